# SPDX-License-Identifier: Apache-2.0
"""Models of real shapes whose weights are made up as they are loaded (`--load-format dummy`): speed
depends on the shape, not on the weights."""

import json
from pathlib import Path
from typing import Any

from bench import shapes

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3,
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "thin": _QWEN3
    | {
        "vocab_size": shapes.VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": shapes.VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
"""By name; `thin` has layers for nothing but what the host does for each, `tiny` is for the test of
the suite itself."""

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def num_layers(name: str) -> int:
    """Decoder layers of a shape."""
    return int(SHAPES[name]["num_hidden_layers"])


def make_model(name: str, root: Path | None = None) -> Path:
    """A folder with the shape's config and a tokenizer of 8,192 tokens, without weights."""
    folder = (root or shapes.cache_root()) / "gpu" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | SHAPES[name], indent=1))
    if not (folder / "tokenizer.json").exists():
        shapes._write_tokenizer(folder)
    return folder
