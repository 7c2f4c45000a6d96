# SPDX-License-Identifier: Apache-2.0
"""What the configuration alone rules out, refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

WITHOUT = "; serve this model without --segreuse"
"""Ends a refusal that only another model, or another configuration of it, gets around."""

BY_TRANSFORMERS = "by its Transformers backend, and its images are not proven"

_STATES_IN_PLACE_OF_KV = (
    "has layers that hand on a state in place of keys and values (linear attention, state space "
    "or convolution), and vLLM keeps nothing of a segment by which that state could be composed, "
    "so that these layers would compute every token all the same"
)
_COMPOSED = (
    "; on a CPU, --no-disable-hybrid-kv-cache-manager has states of such layers composed "
    "(docs/hybrids.md); or serve this model without --segreuse"
)
_WITH_ATTENTION = ("linear_attention", "full_attention")
_COMPOSABLE = {
    "linear_key_head_dim": _WITH_ATTENTION,
    "mamba_n_heads": (*_WITH_ATTENTION, "mamba", "attention", "hybrid"),
    "mamba_num_heads": (*_WITH_ATTENTION, "mamba", "attention", "mlp", "moe"),
    "conv_L_cache": ("conv", "full_attention"),
}
"""Keys of `config.json` of models whose states are composed (`segreuse_extras/states/`), and kinds
of their layers: of the gated delta rule, of Mamba-2, whose states have heads, and of LFM2."""

KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""What `--kv-cache-dtype` may be."""

DRAFTS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose drafts have KV that is moved and computed, too."""

NO_KV = ("ngram", "suffix")
"""Methods that need none."""

_STATES = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding")
"""Kinds of layers that hand a state on, with attention beside it or without."""

_INDEXED = (
    *("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"),
    *("compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"),
)
"""Kinds of layers that attend to what an indexer chooses."""

_INDEXERS = ("index_topk", "index_topk_blocks", "sparse_attention_config")
"""Keys of `config.json` that such models have."""

_LAYER_KINDS = ("layer_types", "layers_block_type")
"""Keys of `config.json` that name the kind of each layer."""


class RefusedError(RuntimeError):
    """Segment reuse cannot be proven right here; the text says why and what to do.

    Attributes:
        reasons: all of them; the text has the first.
    """

    def __init__(self, why: str, *others: str) -> None:
        super().__init__(f"segment reuse cannot start: {why}")
        self.reasons = (why, *others)


def check_config(vllm_config: VllmConfig, cuts: Sequence[int] = ()) -> None:
    """Refuse models and engine options under which reuse is not proven.

    Args:
        vllm_config: the engine's.
        cuts: layers whose inputs are to be kept.

    Raises:
        RefusedError: naming the first of them and the way out.
    """
    checked = (
        _of_model,
        _latent_faults,
        _engine_faults,
        partial(_draft_faults, cuts),
        partial(_cut_faults, cuts),
    )
    if reasons := [why for faults in checked for wrong, why in faults(vllm_config) if wrong]:
        raise RefusedError(*reasons)


def _name(model: ModelConfig) -> str:
    return ", ".join(model.hf_config.architectures or [model.model])


def _of_model(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    return _model_faults(vllm_config.model_config, composes_states(vllm_config))


def composes_states(vllm_config: VllmConfig) -> bool:
    """Whether states of a model's layers are to be composed: it was asked for, by vLLM's hybrid KV
    cache manager, and they can be."""
    can = has_maps(vllm_config.model_config.hf_text_config)
    return can and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is False


def has_maps(text: object) -> bool:
    """Whether states of all layers that hand one on can be composed, and the others are plain
    attention or have no memory, by what `config.json` says of the layers for text."""
    known = next((kinds for key, kinds in _COMPOSABLE.items() if hasattr(text, key)), ())
    named = (getattr(text, key, None) for key in _LAYER_KINDS)
    kinds = next((it for it in named if isinstance(it, list | tuple)), ())
    return all(kind in known for kind in kinds) and any(kind in _STATES for kind in kinds)


def _states_fault(name: str, text: object, there: bool, asked: bool) -> tuple[bool, str]:
    can = has_maps(text)
    return there and not (asked and can), (
        f"{name} {_STATES_IN_PLACE_OF_KV}{_COMPOSED if can else WITHOUT}"
    )


def model_reasons(model_config: ModelConfig, asked: bool = False) -> tuple[str, ...]:
    """Why a model is refused, by its own configuration alone; nothing if it is not known to be.

    Args:
        model_config: of an engine whose whole configuration vLLM may refuse to make.
        asked: whether states are to be composed where they can be.
    """
    return tuple(why for wrong, why in _model_faults(model_config, asked) if wrong)


def text_reasons(name: str, text: object, asked: bool = False) -> tuple[str, ...]:
    """The same by what `config.json` says of the layers for text.

    Args:
        name: of the architecture.
        text: has the configuration's keys as attributes.
        asked: as above.
    """
    states = _states_fault(name, text, _has_layers(text, _STATES), asked)
    return tuple(why for wrong, why in (*_layer_faults(name, text), states) if wrong)


def _layer_faults(name: str, text: object) -> list[tuple[bool, str]]:
    """Kinds of layers that `config.json` tells of; the more special reasons come first."""
    return [
        (
            bool(getattr(text, "altup_num_inputs", 0)),
            f"layers of {name} take several states of each token at once (AltUp), and a pass hands "
            f"on one{WITHOUT}",
        ),
        (
            any(getattr(text, key, None) for key in _INDEXERS) or _has_layers(text, _INDEXED),
            f"{name} attends to tokens that an indexer of its own chooses, whose keys are not "
            f"reused{WITHOUT}",
        ),
        (
            bool(getattr(text, "cross_attention_layers", None)),
            f"layers of {name} attend to images beside the prompt (cross attention){WITHOUT}",
        ),
        (
            bool(getattr(text, "dual_chunk_attention_config", None)),
            f"{name} uses dual chunk attention, whose keys depend on the chunk{WITHOUT}",
        ),
    ]


def _has_layers(text: object, kinds: Sequence[str]) -> bool:
    """Whether `config.json` names layers of these kinds."""
    named = (getattr(text, key, None) for key in _LAYER_KINDS)
    return any(kind in kinds for each in named if isinstance(each, list | tuple) for kind in each)


def _model_faults(model: ModelConfig, asked: bool) -> list[tuple[bool, str]]:
    """Kinds of layers and of models; the more special reasons come first."""
    name, text = _name(model), model.hf_text_config
    hands_on = model.is_hybrid or model.is_attention_free or _has_layers(text, _STATES)
    return [
        *_layer_faults(name, text),
        (model.uses_alibi, f"{name} has ALiBi positions{WITHOUT}"),
        (model.runner_type != "generate", f"{name} is a {model.runner_type} model{WITHOUT}"),
        _states_fault(name, text, hands_on, asked),
        (
            model.is_multimodal_model and model.using_transformers_backend(),
            f"vLLM runs {name} {BY_TRANSFORMERS}"
            + ("; remove --model-impl" if model.model_impl == "transformers" else WITHOUT),
        ),
        (model.is_encoder_decoder, f"{name} is an encoder-decoder model{WITHOUT}"),
    ]


def _latent_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    """Of multi-head latent attention (MLA): what is not proven beside it."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not model.use_mla:
        return []
    by = f"{_name(model)} uses multi-head latent attention (MLA)"
    return [
        (
            cache.cache_dtype.startswith("fp8"),
            f"{by}, whose fp8 KV cache is not proven; use --kv-cache-dtype auto",
        ),
        (
            vllm_config.lora_config is not None,
            f"{by}, which is not proven beside LoRA adapters; remove --enable-lora",
        ),
        (
            _no_cache_of_latents(vllm_config),
            f"{by}, for which vLLM has no prefix cache on CPUs without AMX; use a CPU with AMX or "
            "a GPU, or serve this model without --segreuse",
        ),
    ]


def _no_cache_of_latents(vllm_config: VllmConfig) -> bool:
    """Whether vLLM itself has turned its prefix cache off, as for its CPU_MLA backend."""
    from vllm.platforms import current_platform

    off = not vllm_config.cache_config.enable_prefix_caching
    return bool(vllm_config.model_config.use_mla) and off and current_platform.is_cpu()


def num_sharing(model: ModelConfig) -> int:
    """Layers, the last ones, that share the KV of others."""
    return int(getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0)


def _cut_faults(cuts: Sequence[int], vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    model, name = vllm_config.model_config, _name(vllm_config.model_config)
    if not cuts:
        return []
    layers = model.get_num_layers(vllm_config.parallel_config) - num_sharing(model)
    return [
        (
            max(cuts) >= layers,
            f"similarity.w_exact names layer {max(cuts)}, and the last layer of {name} that writes "
            f'KV is {layers - 1}; remove it, or call it "all"',
        ),
        (
            not model.enforce_eager,
            "similarity.w_exact needs what enters some of the layers, which compiled models do not "
            "report; add --enforce-eager",
        ),
    ]


def _engine_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    lora, model = vllm_config.lora_config, vllm_config.model_config
    # It is then vLLM, and not the user, that has turned the prefix cache off.
    by_vllm = model.is_hybrid or model.is_attention_free or model.runner_type != "generate"
    by_vllm = by_vllm or model.is_encoder_decoder or _no_cache_of_latents(vllm_config)
    return [
        (
            model.enable_prompt_embeds,
            "prompt embeddings are on; remove --enable-prompt-embeds",
        ),
        (
            not cache.enable_prefix_caching and not by_vllm,
            "prefix caching is off; remove --no-enable-prefix-caching",
        ),
        (
            cache.cache_dtype not in KV_CACHE_DTYPES,
            f"kv_cache_dtype={cache.cache_dtype} is quantised in a way that reuse does not handle; "
            "use --kv-cache-dtype fp8 or auto",
        ),
        (
            bool(cache.kv_cache_dtype_skip_layers) and cache.cache_dtype.startswith("fp8"),
            f"some layers are not quantised (kv_cache_dtype_skip_layers="
            f"{cache.kv_cache_dtype_skip_layers}), others are; remove "
            "--kv-cache-dtype-skip-layers, or use --kv-cache-dtype auto",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is on; set both context parallel sizes to 1",
        ),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            f"a mixture of experts with data_parallel_size={parallel.data_parallel_size}, whose "
            "engines compute every layer together; use 1, with --tensor-parallel-size and "
            "--enable-expert-parallel, and several such servers behind a router",
        ),
        (
            lora is not None and lora.enable_tower_connector_lora,
            "LoRA adapts the vision tower, too; remove --enable-tower-connector-lora",
        ),
        (
            cache.kv_sharing_fast_prefill,
            "vLLM would run layers that share the KV of others in a part of the model of its own, "
            "on a prompt's last token only; remove --kv-sharing-fast-prefill",
        ),
        (
            model.enable_sleep_mode and model.sleep_mode_backend != "cumem",
            f"sleep_mode_backend={model.sleep_mode_backend} is not known to bring back pages and "
            "tables where they were; use --sleep-mode-backend cumem, or remove "
            "--enable-sleep-mode",
        ),
        (parallel.enable_eplb, "expert load balancing is on; remove --enable-eplb"),
        (parallel.use_ubatching, "micro-batching is on; remove --enable-dbo"),
        (
            vllm_config.aux_output_config.enable_return_routed_experts,
            "vLLM knows no experts of reused tokens; remove --enable-return-routed-experts",
        ),
    ]


def _draft_faults(cuts: Sequence[int], vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    """Of drafts that have KV of their own."""
    speculative, cache = vllm_config.speculative_config, vllm_config.cache_config
    if speculative is None or speculative.method in NO_KV:
        return []
    method = speculative.method
    by = f"speculative decoding by {method}"
    if method not in DRAFTS or speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp():
        of = getattr(speculative.draft_model_config, "hf_config", None)
        kind = getattr(of, "model_type", method)
        return [
            (
                True,
                f"{by} ({kind}) keeps KV that is not known to move as the model's does; use "
                f"{', '.join((*DRAFTS, *NO_KV))}, or none",
            )
        ]
    return [
        (
            speculative.parallel_drafting,
            f"{by} drafts all tokens at once; remove parallel_drafting",
        ),
        (
            speculative.use_heterogeneous_vocab,
            f"{by} has another vocabulary than the model; use a draft of the same one",
        ),
        (
            vllm_config.lora_config is not None,
            f"{by} beside LoRA adapters is not proven; remove --enable-lora, or use ngram",
        ),
        (
            vllm_config.model_config.using_transformers_backend(),
            f"{by} of a model that vLLM runs by its Transformers backend is not proven; use ngram",
        ),
        (
            num_sharing(vllm_config.model_config) > 0,
            f"{by} of a model with layers that share the KV of others is not proven; use ngram",
        ),
        (
            vllm_config.model_config.is_multimodal_model,
            f"{by} of a model that takes images is not proven; use ngram",
        ),
        (
            vllm_config.model_config.use_mla,
            f"{by} of a model with multi-head latent attention (MLA) is not proven; use ngram",
        ),
        (
            any(
                str(dtype).startswith("fp8")
                for dtype in (cache.cache_dtype, speculative.kv_cache_dtype)
            ),
            f"{by} with an fp8 KV cache is not proven; use --kv-cache-dtype auto, or ngram",
        ),
        (
            bool(cuts) and method != "draft_model",
            f"similarity.w_exact beside {by} is not proven: both are given hidden states; remove "
            "one of them",
        ),
    ]
