# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM runs by its Transformers backend: their layers take a batch of one, and cosines
and sines in place of positions. Which rotation is a layer's own, its keys tell."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.prefill.loaded import POSITIONS, WINDOW, Loaded, loaded, prove, refusal
from vllm_segreuse.model import rope
from vllm_segreuse.model.layer_state import LayerInputs
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.prefill import checks

Patch = pytest.MonkeyPatch
TURNS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OLMO3: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": TURNS,
    "pad_token_id": 0,
}
SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layers": [1, 0, 1],
    "pad_token_id": 0,
}


@pytest.fixture
def olmo(tmp_path: Path) -> Iterator[Loaded]:
    with loaded(tmp_path, **OLMO3) as made:
        yield made


def bases(runtime: checks.Runtime) -> list[float]:
    """By which each layer's second pair turns; 0: by none."""
    ropes = [layer.rope for layer in runtime.prefill.aligner.layers]
    return [0.0 if it is None else float(it.frequencies[1]) for it in ropes]


def test_each_layer_has_the_rotation_of_its_kind(olmo: Loaded) -> None:
    runtime = prove(olmo)
    assert runtime.max_deviation < 1e-5
    wide, near = (theta ** (-2 / 32) for theta in (1e6, 1e4))
    assert bases(runtime) == pytest.approx([near, wide, near], rel=1e-6)


def test_a_layer_without_a_rotation_has_none(tmp_path: Path) -> None:
    with loaded(tmp_path, **SMOLLM3) as model:
        found = bases(prove(model))
    assert found[1] == 0
    assert found[0] == found[2] != 0


def test_in_bfloat16(tmp_path: Path) -> None:
    with loaded(tmp_path, "bfloat16", **OLMO3) as model:
        found = bases(prove(model))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [],
        lambda found: [each for each in found if not each.neox],
        lambda found: [dataclasses.replace(it, frequencies=1.01 * it.frequencies) for it in found],
    ],
    ids=["none", "other pairs", "other frequencies"],
)
def test_a_rotation_that_is_not_the_models_is_found(
    change: Any, olmo: Loaded, monkeypatch: Patch
) -> None:
    read = rope.of_transformers
    monkeypatch.setattr(checks, "of_transformers", lambda model: change(read(model)))
    assert "the cached key" in refusal(olmo)


def test_angles_that_are_others_far_behind_are_found(tmp_path: Path) -> None:
    """NTK scaling of a prompt that is longer than the model was trained for changes all of them:
    here, of positions that no other proof comes to."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changes: dict[str, Any] = {
        "max_position_embeddings": POSITIONS * 3 // 4,
        "rope_parameters": dynamic,
    }
    with loaded(tmp_path, **SMOLLM3, **changes) as model:
        assert "does not turn with its position" in refusal(model)


def test_what_a_layer_rotates_by_is_of_the_tokens_at_hand(olmo: Loaded, monkeypatch: Patch) -> None:
    run = DecoderStack.run

    def other(self: DecoderStack, first: int, last: int, inputs: LayerInputs, state: Any) -> Any:
        further = [
            dict(of)
            | {"position_embeddings": tuple(it.roll(1, 1) for it in of["position_embeddings"])}  # type: ignore[attr-defined]
            for of in inputs.further
        ]
        return run(self, first, last, inputs._replace(further=further), state)

    monkeypatch.setattr(DecoderStack, "run", other)
    assert "does not reproduce this model's own forward" in refusal(olmo)


def test_states_are_not_kept_of_layers_that_are_given_no_positions(olmo: Loaded) -> None:
    assert "takes no positions by which what enters it could be kept" in refusal(olmo, (1,))


def test_frequencies_are_read_once_of_each_kind(olmo: Loaded) -> None:
    found = rope.of_transformers(olmo.model)
    assert len(found) == 4, "two kinds of layers, two ways to pair channels"
    assert all(it.rotary_dim == 32 for it in found)
    assert all(it.frequencies.dtype == torch.float64 for it in found)
