# SPDX-License-Identifier: Apache-2.0
"""Small drafts for speculative decoding, made of their target's weights so that it accepts them.

    DRAFTED shape      layer 0 does nearly all the work, the others little
    draft_model        the target itself
    EAGLE, EAGLE-3,    one layer: the target's layer 0, on the token that the target's hidden state
    MTP                is followed by, and a little of that state

A draft that reads wrong keys, values or hidden states then tells other tokens than its target
answers, and its acceptance falls. Of EAGLE-3 next to nothing is accepted in any case: its own layer
adds nothing to a token's embedding. What it leaves in its KV can be compared all the same.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.shapes import make_model

Weights = dict[str, torch.Tensor]

_OF_STATES = 0.02
"""Share of the target's hidden state in what a draft's layer is given."""


def speculative(method: str, tokens: int = 3) -> tuple[str, dict[str, Any]]:
    """A target shape, and vLLM's `speculative_config` of a draft for it.

    Args:
        method: a key of `TARGETS`.
        tokens: drafted in each step.
    """
    shape = TARGETS[method]
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    if method == "draft_model":
        config["model"] = str(make_model(shape))
    elif method in _MAKERS:
        config["model"] = str(make_draft(method))
    return shape, config


TARGETS = {
    "draft_model": "drafted",
    "eagle": "drafted",
    "eagle3": "drafted",
    "mtp": "drafted_mtp",
}
"""Shapes of `bench/shapes.py`, by the method that drafts for them."""


def make_draft(method: str) -> Path:
    """The directory of a draft, beside its target; made first if it is not there yet."""
    target = make_model(TARGETS[method])
    directory = target.with_name(f"{target.name}-{method}")
    if directory.is_dir():
        return directory
    building = Path(tempfile.mkdtemp(prefix=f".{method}-", dir=target.parent))
    try:
        config = json.loads((target / "config.json").read_text())
        weights = load_file(target / "model.safetensors")
        save_file(_MAKERS[method](weights, config), building / "model.safetensors")
        (building / "config.json").write_text(json.dumps(config))
        building.chmod(0o755)
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def _eagle(weights: Weights, config: dict[str, Any]) -> Weights:
    """EAGLE has no norm in front of its first layer, and no head of its own."""
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    draft = _layer(weights, "layers.0.")
    del draft["layers.0.input_layernorm.weight"]
    return draft | {"fc.weight": _beside_states(torch.eye(config["hidden_size"]), 1)}


def _eagle3(weights: Weights, config: dict[str, Any]) -> Weights:
    """EAGLE-3 attends to embeddings and states side by side, and adds only these up."""
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]  # vLLM's own take five layers
    size = config["hidden_size"]
    draft = _layer(weights, "midlayer.")
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"midlayer.self_attn.{name}.weight"
        draft[name] = _beside_states(draft[name], 1)
    ones = torch.ones(size, dtype=torch.bfloat16)
    return draft | {
        "midlayer.hidden_norm.weight": ones,
        "norm.weight": ones.clone(),
        "fc.weight": _beside_states(torch.zeros(size, 0), 3),
        "lm_head.weight": weights["lm_head.weight"].clone(),
    }


_MAKERS: dict[str, Callable[[Weights, dict[str, Any]], Weights]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
}


def prediction_layer(weights: Weights, config: dict[str, Any]) -> Weights:
    """Weights of an MTP layer of GLM-4.5, as its checkpoints have them behind the others."""
    size, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    ones = torch.ones(size, dtype=torch.bfloat16)
    norms = {f"{prefix}{name}.weight": ones.clone() for name in ("enorm", "hnorm")}
    return (
        _layer(weights, prefix)
        | norms
        | {
            f"{prefix}shared_head.norm.weight": ones,
            f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{prefix}eh_proj.weight": _beside_states(torch.eye(size), 1),
        }
    )


def _layer(weights: Weights, prefix: str) -> Weights:
    first = "model.layers.0."
    return {
        prefix + name.removeprefix(first): weight.clone()
        for name, weight in weights.items()
        if name.startswith(first)
    }


def _beside_states(of_tokens: torch.Tensor, states: int) -> torch.Tensor:
    """A projection of embeddings, and behind it a little of so many states of their size."""
    size = of_tokens.shape[0], states * _hidden_size(of_tokens)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return torch.cat([of_tokens.float(), _OF_STATES * noise], 1).to(torch.bfloat16)


def _hidden_size(of_tokens: torch.Tensor) -> int:
    return of_tokens.shape[1] or of_tokens.shape[0]
