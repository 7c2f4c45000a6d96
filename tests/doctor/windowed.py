# SPDX-License-Identifier: Apache-2.0
"""What keeping all blocks of windowed layers takes, by model: `python -m tests.doctor.windowed`
writes `docs/windows.json`, from which the documentation's table is made.

Configurations are those of `families.json`, and some that differ from one of them in few sizes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor.diagnosis import diagnose
from segreuse_tools.doctor.windowed_kv import WindowedKv
from vllm_segreuse.config import SegReuseConfig

FILE = Path(__file__).parents[2] / "docs" / "windows.json"
BLOCK_SIZE = 32
PROMPTS = (8192, 32768)
"""Tokens; a model that has fewer is left out of the second."""

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_GEMMA_3 = (*_SIZES, "num_key_value_heads", "head_dim")
LIKE: dict[str, tuple[str, dict[str, int]]] = {
    "gemma-3-4b": (
        "gemma-3-27b",
        dict(zip(_GEMMA_3, (2560, 10240, 34, 8, 4, 256), strict=True)),
    ),
    "gemma-3-12b": (
        "gemma-3-27b",
        dict(zip(_GEMMA_3, (3840, 15360, 48, 16, 8, 256), strict=True)),
    ),
    "gpt-oss-120b": ("gpt-oss-20b", {"num_hidden_layers": 36, "num_local_experts": 128}),
}
"""A family, and what is different."""

MODELS = (
    *("gpt-oss-20b", "gpt-oss-120b", "gemma-2-9b"),
    *("gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
    *("gemma-4-e2b", "gemma-4-e4b", "gemma-4-26b-a4b", "gemma-4-31b"),
    *("command-r7b", "olmo-3-7b"),
)


def config_of(name: str) -> dict[str, Any]:
    """The `config.json` of a model."""
    families = json.loads((Path(__file__).parent / "families.json").read_text())
    base, different = LIKE.get(name, (name, {}))
    config: dict[str, Any] = families[base]["config"]
    text = config.get("text_config", config)
    text.update(different)
    if different and "layer_types" in text:  # they alternate in the same way
        kinds = text["layer_types"]
        period = 2 if kinds[0] != kinds[1] else 6
        text["layer_types"] = [kinds[i % period] for i in range(text["num_hidden_layers"])]
    return config


def windowed(name: str, prompt_tokens: int) -> WindowedKv | None:
    """What the doctor says of a prompt of so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(name)))
        args = EngineArgs(model=folder, max_model_len=prompt_tokens, block_size=BLOCK_SIZE)
        return diagnose(args, SegReuseConfig()).windows


def rows() -> dict[str, list[dict[str, Any]]]:
    """By model, what the doctor says of each length of prompt."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in MODELS:
        text = config_of(name)
        longest = text.get("text_config", text)["max_position_embeddings"]
        told = [windowed(name, tokens) for tokens in PROMPTS if tokens <= longest]
        assert None not in told, name
        found[name] = [asdict(it) for it in told if it is not None]
    return found


if __name__ == "__main__":
    lines = (f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in rows().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
