# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for a test model, in the format of peft."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8
_MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def write_adapter(directory: Path, config: dict[str, Any], seed: int) -> Path:
    """Adapts every linear layer of the decoder, visibly.

    Args:
        directory: made if it is not there.
        config: of the model (`Shape.config`).
        seed: of the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    head, hidden = config["head_dim"], config["hidden_size"]
    queries, keys = (config[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    inner = config["intermediate_size"]
    sizes = dict(
        zip(
            _MODULES,
            [
                *[(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)],
                *[(hidden, inner), (hidden, inner), (inner, hidden)],
            ],
            strict=True,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (entering, leaving) in sizes.items():
            where = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.randn(RANK, entering, generator=generator) / entering**0.5
            up = torch.randn(leaving, RANK, generator=generator) * 0.1
            weights |= {f"{where}.lora_A.weight": down, f"{where}.lora_B.weight": up}
    save_file(weights, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[1] for name in _MODULES}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory
