# SPDX-License-Identifier: Apache-2.0
"""A trained model becomes a checkpoint; several become their mean."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.quality import language
from lab.export import export
from lab.model import Qwen3, Shape


def trained(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    shape = Shape(language.VOCABULARY_SIZE)
    torch.save({"shape": asdict(shape), "model": Qwen3(shape).state_dict()}, path)
    return path


def test_of_several_models_the_mean_is_written(tmp_path: Path) -> None:
    runs = [trained(tmp_path / f"{seed}.pt", seed) for seed in (1, 2)]
    folders = [tmp_path / name for name in ("first", "second", "both")]
    for paths, folder in zip((runs[:1], runs[1:], runs), folders, strict=True):
        export(paths, folder)
    first, second, both = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == both.keys()
    differ = 0
    for name, mean in both.items():
        assert mean.dtype == torch.bfloat16
        expected = (first[name].float() + second[name].float()) / 2
        torch.testing.assert_close(mean.float(), expected, rtol=0.02, atol=1e-3)
        differ += not torch.equal(first[name], second[name])
    assert differ > len(both) // 2, "the two are the same: their mean shows nothing"
    config = json.loads((folders[2] / "config.json").read_text())
    assert config["vocab_size"] == language.VOCABULARY_SIZE
