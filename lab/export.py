# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.export MODEL.pt ... DIR`: a checkpoint that vLLM and others load.

Of several models the mean is written: of runs that went on from each other with small steps it is
better than each of them (Wortsman et al. 2022, "Model soups").
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.quality import language


def export(trained: Sequence[Path], folder: Path) -> None:
    """Write `model.safetensors` (bfloat16), the configuration and the tokenizer."""
    saved = [torch.load(path, map_location="cpu", weights_only=True) for path in trained]
    shape = dict(saved[0]["shape"])
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": torch.stack([one["model"][name] for one in saved]).mean(0).bfloat16()
        for name in saved[0]["model"]
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theta = shape.pop("rope_theta")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": language.TOKEN_OF["<bos>"],
        "eos_token_id": language.TOKEN_OF["<eos>"],
        "pad_token_id": language.TOKEN_OF["<pad>"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    language.save_tokenizer(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trained", type=Path, nargs="+", help="model.pt of a training")
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    arguments = parser.parse_args()
    export(arguments.trained, arguments.folder)


if __name__ == "__main__":
    main()
