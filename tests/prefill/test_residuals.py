# SPDX-License-Identifier: Apache-2.0
"""Layers that take a residual and return none (Gemma 4) are given the whole stream at a cut."""

from pathlib import Path
from typing import Any

from tests.prefill.loaded import HEAD_SIZE, WINDOW, loaded, prove

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "global_head_dim": HEAD_SIZE,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def test_what_enters_from_boundary_states_is_proven(tmp_path: Path) -> None:
    with loaded(tmp_path, **GEMMA4) as model:
        assert prove(model, cuts=(0, 1, 2)).max_deviation < 1e-5
