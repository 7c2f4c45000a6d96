# SPDX-License-Identifier: Apache-2.0
"""What the configuration alone rules out, refused before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_OFF = "; serve this model without --segreuse"


class RefusedError(RuntimeError):
    """Segment reuse cannot be proven right here; the text says why and what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(f"segment reuse cannot start: {why}")


def check_config(vllm_config: VllmConfig) -> None:
    """Refuse models and engine options under which reuse is not proven.

    Raises:
        RefusedError: naming the first of them and the way out.
    """
    for wrong, why in _model_faults(vllm_config) + _engine_faults(vllm_config):
        if wrong:
            raise RefusedError(why)


def check_kv_cache(kv_cache_config: KVCacheConfig, block_size: int) -> None:
    """Refuse a KV cache of any shape but one group of full attention, hashed block by block.

    Raises:
        RefusedError: naming what was found.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        raise RefusedError(
            f"the model needs {len(groups)} KV cache groups ({', '.join(kinds)}), one group of "
            f"full attention is supported{_OFF}"
        )
    spec = groups[0].kv_cache_spec
    # Without vLLM's hybrid KV cache manager these, too, come as full attention.
    for wrong, what in (
        (spec.sliding_window is not None, f"a sliding window of {spec.sliding_window} tokens"),
        (spec.attention_chunk_size is not None, f"chunks of {spec.attention_chunk_size} tokens"),
        (spec.non_causal, "tokens behind their own"),
    ):
        if wrong:
            raise RefusedError(f"layers of the model attend to {what}{_OFF}")
    hash_block_size = getattr(kv_cache_config, "hash_block_size", None) or block_size
    if hash_block_size != block_size:
        raise RefusedError(
            f"blocks of {block_size} tokens are hashed in pieces of {hash_block_size}; leave the "
            "hash block size at its default"
        )


def _model_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    model = vllm_config.model_config
    name = ", ".join(model.hf_config.architectures or [model.model])
    text = model.hf_text_config
    window = getattr(text, "sliding_window", None)
    windowed = bool(window) and getattr(text, "use_sliding_window", True)
    return [
        (model.runner_type != "generate", f"{name} is a {model.runner_type} model{_OFF}"),
        (model.use_mla, f"{name} uses multi-head latent attention (MLA){_OFF}"),
        (
            model.is_hybrid or model.is_attention_free,
            f"{name} has layers without attention (a hybrid or state-space model){_OFF}",
        ),
        (model.is_encoder_decoder, f"{name} is an encoder-decoder model{_OFF}"),
        (model.uses_mrope, f"{name} uses multimodal rotary positions (M-RoPE){_OFF}"),
        (windowed, f"{name} uses sliding-window attention (sliding_window={window}){_OFF}"),
        (model.enable_prompt_embeds, "prompt embeddings are on; remove --enable-prompt-embeds"),
    ]


def _engine_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    experts = vllm_config.model_config.is_moe
    return [
        (
            not cache.enable_prefix_caching,
            "prefix caching is off; remove --no-enable-prefix-caching",
        ),
        (
            cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
            f"kv_cache_dtype={cache.cache_dtype} is quantised; use --kv-cache-dtype auto",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}; use tensor parallelism",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is on; set both context parallel sizes to 1",
        ),
        (
            parallel.data_parallel_size > 1 and experts,
            f"a mixture of experts with data_parallel_size={parallel.data_parallel_size}; use 1",
        ),
        (parallel.enable_eplb, "expert load balancing is on; remove --enable-eplb"),
        (parallel.use_ubatching, "micro-batching is on; remove --enable-dbo"),
        (
            speculative is not None and speculative.method not in ("ngram", "suffix"),
            f"speculative decoding by {getattr(speculative, 'method', None)} needs hidden states "
            "that reuse skips; use ngram, or none",
        ),
    ]
