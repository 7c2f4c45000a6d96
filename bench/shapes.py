# SPDX-License-Identifier: Apache-2.0
"""Small random-weight models in Hugging Face format, made on the spot: nothing is downloaded.

`make_model("llama")` writes a checkpoint (config, safetensors, a real BPE tokenizer with a chat
template) once and returns its directory; `python -m bench.shapes NAME` prints it.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RECIPE_VERSION = 1
"""Raise it when the way weights or tokenizer are made changes: cached models are made anew."""

# transformers changes torch's default dtype while it builds a model: two threads that do so at once
# may leave the changed one behind.
_BUILDING = threading.Lock()

VOCAB_SIZE = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Last tokens of a vision model's vocabulary, by their names in its config."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """One model to be made: its `model_type` in transformers, its config, why it is here, engine
    arguments that it needs, and whether its first layer does nearly all the work: a draft of one
    layer can then tell what it will answer (`bench/drafts.py`)."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    predictable: bool = False


_TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}


_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


def _tiny(model_type: str, why: str, **config: Any) -> Shape:
    return Shape(model_type, _TINY | config, why)


def _scaled(why: str, **rope: Any) -> Shape:
    return _tiny("llama", why, rope_parameters={"rope_theta": 10000.0, **rope})


_LAYER_TYPES = {"s": "sliding_attention", "f": "full_attention"}


def _windowed(model_type: str, why: str, layers: str, **config: Any) -> Shape:
    """A model whose layers attend to a window (`s`) or to everything (`f`)."""
    types = [_LAYER_TYPES[layer] for layer in layers]
    return _tiny(model_type, why, layer_types=types, **{"sliding_window": 96} | config)


def _latent(model_type: str, why: str, **config: Any) -> Shape:
    """A model of DeepSeek's kind. vLLM's backends take latent vectors of this size only."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
    }
    heads = {"num_key_value_heads": 4, "head_dim": 64}
    # As DeepSeek and Kimi have it. Without, vLLM 0.32 turns latent models' keys wrongly on CPUs
    # where models run eagerly.
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 4096,
    }
    return _tiny(model_type, why, **latent | experts | heads | {"rope_parameters": rope} | config)


def _vision(model_type: str, why: str, mrope_section: list[int], **vision: Any) -> Shape:
    """A model of text and images."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": mrope_section}
    small = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    config = {
        "text_config": _TINY | _NO_SPECIAL_TOKENS | {"rope_parameters": rope},
        "vision_config": small | {"out_hidden_size": _TINY["hidden_size"]} | vision,
        "tie_word_embeddings": False,
    }
    config |= {name: VOCAB_SIZE - 4 + i for i, name in enumerate(VISION_TOKENS)}
    return Shape(model_type, config, why, {"limit_mm_per_prompt": {"image": 1, "video": 0}})


_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_FEW_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_HYBRID = {
    "block_size": 128,
    "enable_prefix_caching": True,
    "disable_hybrid_kv_cache_manager": False,
    "mamba_ssm_cache_dtype": "float32",  # as by itself where the CPU computes bfloat16
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
_QWEN3_5 = (
    _TINY
    | _DELTA_RULE
    | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
)
"""Also models of text alone keep the sections of M-RoPE, which vLLM takes away then."""


def _hybrid(model_type: str, why: str, **config: Any) -> Shape:
    """A model of which some layers hand a state on."""
    return Shape(model_type, _TINY | config, why, arguments=_HYBRID)


def _with_states_and_images(model_type: str, why: str, **text: Any) -> Shape:
    """A model of the Qwen3.5 kind as it is published."""
    shape = _vision(
        model_type,
        why,
        [2, 1, 1],
        num_position_embeddings=64,
    )
    config = shape.config | {"text_config": _QWEN3_5 | _NO_SPECIAL_TOKENS | text}
    return replace(shape, config=config, arguments=shape.arguments | _HYBRID)


SUPPORTED: dict[str, Shape] = {
    "llama": _tiny("llama", "dense, GQA, plain RoPE"),
    "llama_hd64": _tiny("llama", "wider heads", hidden_size=256, head_dim=64),
    "llama_mha": _tiny("llama", "as many KV heads as heads", num_key_value_heads=4),
    "llama3": _scaled(
        "llama3 scaling",
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=2048,
    ),
    "llama_yarn": _scaled(
        "YaRN: the cached key carries a magnitude",
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=2048,
    ),
    "llama_linear": _scaled("linear scaling", rope_type="linear", factor=4.0),
    "llama_ntk": _scaled(
        "dynamic NTK scaling",
        rope_type="dynamic",
        factor=2.0,
        max_trained_positions=2048,
    ),
    "mistral": _tiny("mistral", "Mistral without a window", sliding_window=None),
    "qwen2": _tiny("qwen2", "biases on q, k, v"),
    "qwen3": _tiny("qwen3", "norms on q and k"),
    "qwen3_moe": _tiny(
        "qwen3_moe",
        "experts",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    ),
    "minimax_m2": _tiny(
        "minimax_m2",
        # By sigmoid, as MiniMax has it, vLLM's CPU build chooses no experts.
        "norms on q and k of all heads together, rotates half of each head, experts",
        rotary_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        use_qk_norm=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        scoring_func="softmax",
        use_routing_bias=True,
    ),
    "hy_v3": _tiny(
        "hy_v3",
        "norms on q and k, experts by sigmoid beside a shared one",
        qk_norm=True,
        num_experts=4,
        num_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        expert_hidden_dim=128,
        first_k_dense_replace=1,
        route_norm=True,
        moe_router_use_sigmoid=True,
        moe_router_enable_expert_bias=True,
    ),
    "ministral3": _tiny(
        "ministral3",
        "YaRN, and queries that grow with the position",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 256,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "phi3_partial": _tiny(
        "phi3", "rotates half of each head", hidden_size=256, head_dim=64, partial_rotary_factor=0.5
    ),
    "phi3_longrope": _tiny(
        "phi3",
        "LongRoPE: the factors of long prompts, by max_model_len",
        original_max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + i / 4 for i in range(16)],
            "original_max_position_embeddings": 2048,
        },
    ),
    "ernie": _tiny("ernie4_5", "interleaved RoPE", use_bias=False),
    "glm4": _tiny("glm4", "interleaved and partial RoPE", hidden_size=256, head_dim=64),
    "gemma2": _windowed(
        "gemma2",
        "windows on some layers, attention logits are capped",
        "sfsf",
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _windowed(
        "gemma3_text",
        "windows on some layers, another RoPE on these",
        "sfsf",
        query_pre_attn_scalar=32,
    ),
    "gemma4": _windowed(
        "gemma4_text",
        "windows on some layers, wider heads on the others",
        "sfsf",
        global_head_dim=64,
        hidden_size_per_layer_input=0,
    ),
    "gemma4_e": _windowed(
        "gemma4_text",
        "half of the layers share the KV of others, with or without a window; each layer has an "
        "input of its own for each token",
        "sfsfsfsf",
        num_hidden_layers=8,
        num_key_value_heads=1,
        global_head_dim=64,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB_SIZE,
        use_double_wide_mlp=True,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "cohere2": _windowed(
        "cohere2", "windows on some layers, no RoPE on the others", "ssfs", logit_scale=1.0
    ),
    "exaone4": _windowed(
        "exaone4",
        "windows on some layers, no RoPE on the others, norms behind attention and MLP",
        "sfsf",
        sliding_window_pattern="LG",
    ),
    "gemma4_moe": _windowed(
        "gemma4_text",
        "windows on some layers; on the others one wider KV head, of which the key is the value; "
        "experts",
        "sfsf",
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=128,
    ),
    "llama4": _tiny(
        "llama4_text",
        "chunks on some layers, no RoPE on the others, experts",
        attention_chunk_size=96,
        no_rope_layers=[1, 0, 1, 0],
        interleave_moe_layer_step=1,
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        use_qk_norm=True,
        attn_temperature_tuning=True,
        floor_scale=256,
        attn_scale=0.1,
    ),
    "olmo2": _tiny("olmo2", "by vLLM's Transformers backend; norms behind attention and MLP"),
    "olmo3": _windowed("olmo3", "by vLLM's Transformers backend; windows on some layers", "sfsf"),
    "smollm3": _tiny(
        "smollm3",
        "by vLLM's Transformers backend; no RoPE on some layers",
        no_rope_layers=[1, 1, 0, 1],
    ),
    "glm": _tiny(
        "glm",
        "by vLLM's Transformers backend; interleaved and partial RoPE",
        hidden_size=256,
        head_dim=64,
        partial_rotary_factor=0.5,
    ),
    "gpt_neox": _tiny(
        "gpt_neox",
        "by vLLM's Transformers backend; attention and MLP side by side, partial RoPE",
        num_key_value_heads=4,
    ),
    "gpt_oss": _windowed(
        "gpt_oss",
        "windows on some layers, attention sinks on all, experts",
        "sfsf",
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
}
"""Shapes that segment reuse supports: four layers that write KV, a moment to load."""

VISION: dict[str, Shape] = {
    "qwen2_5_vl": _vision(
        "qwen2_5_vl",
        "M-RoPE: channels of time, height and width side by side",
        [4, 6, 6],
        fullatt_block_indexes=[0],
    ),
    "qwen3_vl": _vision(
        "qwen3_vl",
        "interleaved M-RoPE",
        [6, 5, 5],
        deepstack_visual_indexes=[0],
        num_position_embeddings=64,
    ),
}
"""Supported, too: reuse for prompts of text. Serving them needs torchvision."""

LATENT: dict[str, Shape] = {
    "deepseek_v2": _latent(
        "deepseek_v2", "multi-head latent attention (MLA), experts", q_lora_rank=None
    ),
    "mistral_large_3": _latent(
        "deepseek_v3",
        "MLA with queries that grow with the position, which each layer is given the scales of",
        q_lora_rank=48,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        llama_4_scaling={"original_max_position_embeddings": 512, "beta": 0.1},
    ),
    "deepseek_v3": _latent(
        "deepseek_v3",
        "MLA with projected queries, experts in groups",
        q_lora_rank=48,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
}
"""Supported, too, where vLLM has a prefix cache for them: on GPUs, and on CPUs with AMX."""

DRAFTED: dict[str, Shape] = {
    "drafted": replace(
        _tiny("llama", "a draft of one layer can tell its answers"), predictable=True
    ),
    "drafted_mtp": replace(
        _tiny(
            "glm4_moe",
            "the same, with experts and a multi-token prediction layer (MTP)",
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            n_shared_experts=1,
            first_k_dense_replace=0,
            num_nextn_predict_layers=1,
        ),
        predictable=True,
    ),
}
"""Targets of `bench/drafts.py`."""

REFUSED: dict[str, Shape] = {
    "mistral_window": _tiny("mistral", "sliding window on every layer", sliding_window=1024),
    "minicpm3": _tiny(
        "minicpm3",
        "keys of which a part is rotated by itself",
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    "jamba": _tiny(
        "jamba",
        "hybrid: Mamba, of which each channel fades by itself, beside attention",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_dt_rank=8,
    ),
}
"""Shapes that the plugin must refuse at start-up, by name."""

_NEXT: dict[str, Any] = (
    _TINY
    | _DELTA_RULE
    | _FEW_EXPERTS
    | {"full_attention_interval": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
)

STATES: dict[str, Shape] = {
    "qwen3_next": Shape(
        "qwen3_next",
        _NEXT,
        "three layers of four hand a state on (gated delta rule), experts",
        arguments=_HYBRID,
    ),
    "qwen3_5_text": Shape(
        "qwen3_5_text",
        _QWEN3_5,
        "the same, with projections of another layout; no experts",
        arguments=_HYBRID,
    ),
    "qwen3_5": _with_states_and_images("qwen3_5", "the same, with images and interleaved M-RoPE"),
    "qwen3_5_moe": _with_states_and_images(
        "qwen3_5_moe", "the same, with images, interleaved M-RoPE and experts", **_FEW_EXPERTS
    ),
}
"""Shapes whose states are composed, by vLLM's hybrid KV cache manager only."""

STATES_OF_MAMBA2: dict[str, Shape] = {
    "granite_4_h": _hybrid(
        "granitemoehybrid",
        "three layers of four hand a state on (Mamba-2), no RoPE on the other, experts",
        **_MAMBA2,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        position_embedding_type="nope",
        attention_multiplier=32**-0.5,
        num_local_experts=4,
        num_experts_per_tok=4,
        shared_intermediate_size=64,
    ),
    "nemotron_h": _hybrid(
        "nemotron_h",
        "layers of Mamba-2, of attention without RoPE and of an MLP, one behind the other",
        hybrid_override_pattern="M-MM*-M-",
        mamba_num_heads=4,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=2,
        chunk_size=64,
    ),
    "falcon_h1": _hybrid(
        "falcon_h1",
        "Mamba-2 and attention side by side in each layer",
        **_MAMBA2,
        mamba_d_ssm=256,
        num_hidden_layers=3,
    ),
}
"""The same, of Mamba-2; the others are of the gated delta rule."""

_SHORT_CONV: dict[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "num_hidden_layers": 6,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
"""As LFM2 begins and ends. vLLM takes its embeddings for the head, whatever its config says."""
_LFM2: dict[str, Any] = _SHORT_CONV | {
    "conv_dim": _TINY["hidden_size"],
    "block_dim": _TINY["hidden_size"],
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0,
}

STATES_OF_CONVOLUTIONS: dict[str, Shape] = {
    "lfm2": _hybrid(
        "lfm2",
        "short convolutions, which hand on their last inputs, beside attention",
        **_LFM2,
    ),
    "lfm2_moe": _hybrid(
        "lfm2_moe",
        "the same, with experts by sigmoid behind two dense layers",
        **_SHORT_CONV,
        num_dense_layers=2,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    ),
    "lfm2_vl": Shape(
        "lfm2_vl",
        {
            "text_config": _TINY
            | _LFM2
            | _NO_SPECIAL_TOKENS
            | {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]},
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_patches": 64,
            },
            "image_token_id": VOCAB_SIZE - 1,
            "projector_hidden_size": 64,
        },
        "short convolutions inside a model that takes images, and is given none",
        arguments=_HYBRID | {"limit_mm_per_prompt": {"image": 0}},
    ),
}
"""The same, of short convolutions alone."""

COMPOSED = STATES | STATES_OF_MAMBA2 | STATES_OF_CONVOLUTIONS
"""All of these."""

_BENCH: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}

BENCH: dict[str, Shape] = {
    "bench8": Shape("qwen3", _BENCH | {"num_hidden_layers": 8}, "benchmarks and demo"),
    "bench28": Shape("qwen3", _BENCH | {"num_hidden_layers": 28}, "as deep as a model of 1.5 B"),
    "host": Shape(
        "qwen3",
        _BENCH
        | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
        | {"max_position_embeddings": 131072},
        "costs next to nothing: what is left is the host's",
    ),
    "bench32_states": Shape(
        "qwen3_next",
        _NEXT
        | {"num_hidden_layers": 32, "hidden_size": 256, "head_dim": 64}
        | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
        "24 layers hand a state on, 8 attend",
        arguments=_HYBRID,
    ),
}
"""Shapes for measurements: 8,000 tokens take seconds on two cores, mostly in matrix products and
attention, yet a run is over in minutes."""

SHAPES: dict[str, Shape] = SUPPORTED | VISION | LATENT | DRAFTED | REFUSED | COMPOSED | BENCH


def cache_root() -> Path:
    """`$VLLM_SEGREUSE_CACHE`, or `~/.cache/vllm-segreuse`."""
    chosen = os.environ.get("VLLM_SEGREUSE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "vllm-segreuse"


def make_model(name: str, root: Path | str | None = None) -> Path:
    """Return the directory of the model `name`, made first if it is not there yet.

    Args:
        name: a key of `SHAPES`.
        root: where models are kept; `cache_root()` by default.

    Raises:
        KeyError: `name` is none of `SHAPES`.
    """
    if name not in SHAPES:
        raise KeyError(f"no model shape is named {name!r}; choose from {', '.join(SHAPES)}")
    shape = SHAPES[name]
    models = (Path(root) if root else cache_root()) / "models"
    target = models / f"{name}-{_recipe_hash(shape)}"
    if target.is_dir():
        return target

    models.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=models))
    try:
        _write_weights(shape, draft)
        if "vision_config" in shape.config:
            _write_tokenizer(draft, tuple(VISION_TOKENS.values()))
            if VISION_TOKENS.keys() <= shape.config.keys():
                _write_processors(draft, shape)
        else:
            _write_tokenizer(draft)
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was quicker, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _recipe_hash(shape: Shape) -> str:
    # The tokenizer is trained on Python's own documentation, which changes with its version.
    python = platform.python_version_tuple()[:2]
    recipe = [RECIPE_VERSION, python, shape.model_type, shape.config]
    if shape.predictable:
        recipe.append("predictable")
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _write_weights(shape: Shape, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(shape.model_type, **shape.config, **_NO_SPECIAL_TOKENS)
    auto = AutoModelForImageTextToText if "vision_config" in shape.config else AutoModelForCausalLM
    with _BUILDING:
        model = auto.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        std = _weight_std(parameter_name, parameter.shape)
        with torch.no_grad():
            if parameter_name.endswith("A_log"):  # heads that forget slowly, and fast
                rates = torch.linspace(-7, -2, len(parameter))
                parameter.copy_(rates.view(-1, *(1,) * (parameter.dim() - 1)))
            elif std is None:
                # Norms of Gemma 2 and 3 multiply by 1 + weight.
                from_one = shape.model_type.startswith(("gemma2", "gemma3"))
                parameter.fill_(0.0 if from_one else 1.0)
            else:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * std * _loudness(shape, parameter_name))
    model.save_pretrained(directory)
    if shape.config.get("num_nextn_predict_layers"):
        _add_prediction_layer(directory, shape.config)


def _add_prediction_layer(directory: Path, config: dict[str, Any]) -> None:
    """transformers knows no multi-token prediction: its layer is written beside the others."""
    from safetensors.torch import load_file, save_file

    from bench.drafts import prediction_layer

    path = directory / "model.safetensors"
    weights = load_file(path)
    save_file(weights | prediction_layer(weights, config), path, {"format": "pt"})


def _loudness(shape: Shape, name: str) -> float:
    """How much of its usual size a weight has."""
    if "embed_tokens" in name and shape.model_type.startswith("lfm2"):  # the head's as well
        return 2.0 / math.sqrt(shape.config.get("text_config", shape.config)["hidden_size"])
    if not shape.predictable or not name.endswith(
        ("o_proj.weight", "down_proj.weight", "down_proj")
    ):
        return 1.0
    return 3.0 if "layers.0.self_attn" in name else 0.05


def _weight_std(name: str, size: tuple[int, ...]) -> float | None:
    """Standard deviation of a weight, None for a norm's.

    Scaled by fan-in, so that activations keep their size over any number of layers. Queries and
    keys are somewhat larger: attention then has favourites, and a wrong key shows in the output.
    """
    if "norm" in name:
        return None
    if "embed_tokens" in name:
        return 1.0
    if name.endswith("bias"):
        return 0.1
    if name.endswith("sinks"):
        return 1.0
    gain = 1.0
    if "lm_head" in name:
        gain = 2.0
    elif any(part in name for part in ("q_proj", "k_proj", "qkv_proj")):
        gain = 1.4
    elif any(part in name for part in ("o_proj", "down_proj", "out_proj")):
        gain = 0.5
    return gain / math.sqrt(size[-1])


def passages() -> list[tuple[str, str]]:
    """(topic, text) of the reference documentation that ships with Python, in a fixed order."""
    from pydoc_data.topics import topics

    return sorted(topics.items())


def _training_text() -> Iterator[str]:
    for _, text in passages():
        yield text


def _write_tokenizer(directory: Path, last_tokens: tuple[str, ...] = ()) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(last_tokens),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.add_special_tokens(list(last_tokens))
    end_of_text, _, im_end = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=im_end,
        pad_token=end_of_text,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def _write_processors(directory: Path, shape: Shape) -> None:
    """Of images and videos; both cut them into patches as the model's configuration says."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    common = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224},
    }
    of_qwen3 = shape.model_type.startswith("qwen3")
    video = "Qwen3VLVideoProcessor" if of_qwen3 else "Qwen2VLVideoProcessor"
    image = common | {"image_processor_type": "Qwen2VLImageProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video_processor = common | {"video_processor_type": video}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video_processor))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model and print its directory.")
    parser.add_argument("name", choices=sorted(SHAPES))
    print(make_model(parser.parse_args().name))


if __name__ == "__main__":
    main()
