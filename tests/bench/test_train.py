# SPDX-License-Identifier: Apache-2.0
"""Training of the lab's model: what was stopped goes on as if it had not been."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lab import __main__ as script
from lab import mixture
from lab.curriculum import Lesson
from lab.mixture import Batch, Stage

pytestmark = pytest.mark.slow  # of how our own models are trained

SHORT = [
    Lesson(Stage(48, 2, max_hops=0, recall=1.0), 6, enough=0.0),  # left after its first window
    Lesson(Stage(64, 2, max_hops=1), 6, falling=True),
]


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "WINDOW", 3)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


def _training(out: Path, seed: int = 0, kind: str = "qwen3") -> script.Training:
    return script.Training(out, seed, "cpu", SHORT, kind)


def _stop_at(training: script.Training, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = mixture.batch

    def one(rng: Random, stage: Stage) -> Batch:
        if training.step == step:
            raise KeyboardInterrupt
        return draw(rng, stage)

    with monkeypatch.context() as patch:
        patch.setattr(mixture, "batch", one)
        with pytest.raises(KeyboardInterrupt):
            training.run()


def _weights(out: Path) -> dict[str, torch.Tensor]:
    saved: dict[str, torch.Tensor] = torch.load(out / "model.pt", weights_only=True)["model"]
    return saved


def _curve(out: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    return [{name: e[name] for name in e if name != "seconds"} for e in entries]


@pytest.mark.parametrize("steps", [(2,), (4, 8)])
def test_a_training_that_was_stopped_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    _training(tmp_path / "whole").run()
    for step in steps:
        _stop_at(_training(tmp_path / "stopped"), step, monkeypatch)
    _training(tmp_path / "stopped").run()
    whole, stopped = _weights(tmp_path / "whole"), _weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert _curve(tmp_path / "stopped") == _curve(tmp_path / "whole")
    assert [entry["step"] for entry in _curve(tmp_path / "whole")] == [3, 6, 9]
    # Done: nothing more to learn.
    _training(tmp_path / "stopped").run()
    assert len(_curve(tmp_path / "stopped")) == 3


def test_the_model_is_the_mean_of_the_last_lesson(tmp_path: Path) -> None:
    training = _training(tmp_path)
    training.run()
    last, mean = training.model.state_dict(), _weights(tmp_path)
    assert not torch.equal(last["layers.0.mlp.up_proj.weight"], mean["layers.0.mlp.up_proj.weight"])


def test_a_folder_of_another_seed_is_refused(tmp_path: Path) -> None:
    _training(tmp_path).run()
    with pytest.raises(ValueError, match="seed 0, not 1"):
        _training(tmp_path, seed=1)


def test_a_hybrid_is_trained_and_goes_on_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _training(tmp_path / "whole", kind="hybrid").run()
    _stop_at(_training(tmp_path / "stopped", kind="hybrid"), 4, monkeypatch)
    _training(tmp_path / "stopped", kind="hybrid").run()
    whole, stopped = _weights(tmp_path / "whole"), _weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    begun = script.Training(tmp_path / "begun", 0, "cpu", [], "hybrid").model.state_dict()
    assert not torch.equal(begun["layers.0.linear_attn.A_log"], whole["layers.0.linear_attn.A_log"])
    with pytest.raises(ValueError, match="kind hybrid, not qwen3"):
        _training(tmp_path / "whole")


@pytest.mark.parametrize("kind", script.KINDS)
def test_only_the_last_lesson_falls(kind: str) -> None:
    falling = [lesson.falling for lesson in script.KINDS[kind].curriculum]
    assert falling == [False] * (len(falling) - 1) + [True]
