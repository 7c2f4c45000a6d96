# SPDX-License-Identifier: Apache-2.0
"""Device memory that a pass takes beyond what vLLM's profile run has seen.

vLLM runs the model once on `max_num_batched_tokens` tokens, and gives the KV cache what is left. A
chunk of a pass is no larger than that run. What comes on top is bounded here, and reserved while
vLLM measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.kernels.scratch import SCRATCH_BYTES
from vllm_segreuse.model.documents import sees_documents_alone
from vllm_segreuse.options.server import STEP_TOKENS
from vllm_segreuse.prefill.compared import COMPARED_TOKENS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_BUILDER_BYTES = 16 << 20
_FLOAT32_BYTES = 4
_INDEX_BYTES = 256
"""Of each token of a plan: ids, positions, slots and scores, sorted and taken apart."""
_FLASHINFER_ELEMENT_BYTES = 16  # vLLM's FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM
_POSITION_BYTES = 4
_EAGLE3_LAYERS = 3  # vLLM's get_eagle3_default_aux_hidden_state_layers


def state_bytes_per_token(vllm_config: VllmConfig, cuts: Sequence[int]) -> int:
    """What boundary states take for each token of the KV cache, beside it: at each cut a residual
    stream, and its position (`prefill/states.py`). Equal on all ranks."""
    model = vllm_config.model_config
    state = int(model.get_hidden_size()) * int(model.dtype.itemsize)
    return len(cuts) * (state + _POSITION_BYTES)


def kv_bytes(
    available: int, vllm_config: VllmConfig, specs: Mapping[str, Any], cuts: Sequence[int]
) -> int:
    """What is left for KV if the boundary states of the same tokens are to fit beside it.

    Args:
        available: bytes for both.
        specs: vLLM's `KVCacheSpec` of each layer.
    """
    of_kv = sum(spec.page_size_bytes / spec.block_size for spec in specs.values())
    of_states = state_bytes_per_token(vllm_config, cuts)
    return int(available * of_kv / (of_kv + of_states))


def pass_bytes(vllm_config: VllmConfig) -> int:
    """Most bytes on the device that a pass holds beside the activations of one chunk.

    The states (hidden states and residual) of a prompt of maximum length at a boundary layer, and
    those of a step's plans while that one is under way; what tells their tokens apart; what tokens
    are chosen by, of one chunk at one layer; what halos of similar segments are compared with; the
    scratch of overlapping moves, and the buffers of the metadata builder. What is computed once
    more, because a drift was too large or segments were rejected, is so one plan after the other.
    Where tokens enter at cuts, states are joined with others. Where layers attend to windows,
    SparseX runs new tokens to a layer behind the boundary, beside the states there. EAGLE-3 drafts
    are given what enters some of the layers. Between pipeline stages states are copied to be sent.
    """
    model = vllm_config.model_config
    tokens = _prompts(vllm_config) * model.max_model_len
    tokens += vllm_config.scheduler_config.max_num_batched_tokens
    config = _config(vllm_config)
    tokens += _sent_tokens(vllm_config, config)
    text, of_windows = model.hf_text_config, ("sliding_window", "attention_chunk_size")
    has_windows = any(getattr(text, name, None) is not None for name in of_windows)
    states = 6 if config.cuts else 4 if has_windows else 2
    states += _auxiliary_layers(vllm_config)
    of_token = states * model.get_hidden_size() * model.dtype.itemsize + _INDEX_BYTES
    return (
        tokens * of_token
        + _choice_bytes(vllm_config)
        + _halo_bytes(vllm_config, config)
        + SCRATCH_BYTES
        + _builder_bytes(vllm_config)
    )


def _sent_tokens(vllm_config: VllmConfig, config: SegReuseConfig) -> int:
    """Tokens whose states are on their way to the next pipeline stage: the shares of two steps,
    each with the chunk that reaches it."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return 0
    most = int(vllm_config.scheduler_config.max_num_batched_tokens)
    share = config.spread_work(most, 1) or most
    return 2 * (share + most)


def _choice_bytes(vllm_config: VllmConfig) -> int:
    """What tokens are chosen by, of a chunk of the largest size: its queries at a layer, which the
    backend may have been given in fp8; or its keys and values there and the reused ones, which are
    compared one after the other, in float32."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    element, channels = model.dtype.itemsize, _channels(model)
    of_query = 2 * element + _FLOAT32_BYTES
    queries = model.get_num_attention_heads(parallel) * channels * of_query
    of_key = 4 * element + 2 * _FLOAT32_BYTES
    compared = model.get_num_kv_heads(parallel) * channels * of_key
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    return int(chunk * max(queries, compared))


def _channels(model: ModelConfig) -> int:
    """Of the widest head: in Gemma 4 those of layers without a window have more."""
    wider = getattr(model.hf_text_config, "global_head_dim", None)
    return max(int(model.get_head_size()), int(wider or 0))


def _auxiliary_layers(vllm_config: VllmConfig) -> int:
    """Layers whose inputs an EAGLE-3 draft is given, of all tokens of a plan."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "eagle3":
        return 0
    config = speculative.draft_model_config.hf_config
    named = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    return len(named) if named else _EAGLE3_LAYERS


def _config(vllm_config: VllmConfig) -> SegReuseConfig:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return SegReuseConfig.from_options(transfer.kv_connector_extra_config)


def _prompts(vllm_config: VllmConfig) -> int:
    """Prompts of maximum length whose plans are under way together."""
    # Some plans are never spread, and run beside one that is under way: those with an adapter or
    # with images, and those of documents that the model was trained to see computed alone.
    model = vllm_config.model_config
    adapted = vllm_config.lora_config is not None
    alone = sees_documents_alone(model)
    return 2 if alone or adapted or model.is_multimodal_model else 1


def _halo_bytes(vllm_config: VllmConfig, config: SegReuseConfig) -> int:
    """Keys and values at all layers of the tokens that are compared; and of one layer what the
    comparison makes of them, in float32."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    segments = config.compared_segments(model.max_model_len)
    if segments is None:
        return 0
    of_a_step = config.max_step_tokens or STEP_TOKENS["other"]
    tokens = _prompts(vllm_config) * (COMPARED_TOKENS + segments) + of_a_step
    channels = model.get_num_kv_heads(parallel) * _channels(model)
    halves = 1 if model.use_mla else 2
    kept = halves * model.get_num_layers(parallel) * model.dtype.itemsize
    return tokens * channels * (kept + 4 * _FLOAT32_BYTES)


def _builder_bytes(vllm_config: VllmConfig) -> int:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.use_mla:  # latent vectors of a prefill's context
        from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

        tokens = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        return _BUILDER_BYTES + int(tokens * model.get_head_size() * model.dtype.itemsize)
    backend = vllm_config.attention_config.backend
    if backend is None or backend.name != "FLASHINFER":
        return _BUILDER_BYTES
    import vllm.envs as envs

    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    channels = model.get_num_attention_heads(parallel) * _channels(model)
    workspace = max(
        envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, chunk * channels * _FLASHINFER_ELEMENT_BYTES
    )
    return _BUILDER_BYTES + int(workspace)
