# SPDX-License-Identifier: Apache-2.0
"""Passes number tokens in one row; a model with M-RoPE must compute the same from three equal
rows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from tests.prefill.loaded import Loaded, loaded
from vllm_segreuse.prefill import checks
from vllm_segreuse.supported import RefusedError

Patch = pytest.MonkeyPatch


def prove(model: Loaded) -> checks.Runtime:
    return checks.prove(model.model, model.vllm_config, model.kv_cache_config)


@pytest.fixture(scope="module")
def mrope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A model that numbers tokens by time, height and width."""
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    with loaded(tmp_path_factory.mktemp("mrope"), rope_parameters=rope_parameters) as made:
        made.model.get_mrope_input_positions = lambda tokens, _: (
            torch.arange(len(tokens)).expand(3, -1),
            0,
        )
        yield made


def rotations(model: Loaded) -> set[tuple[int, ...]]:
    """Shapes of the positions that the rotary modules are given, without their tokens."""
    seen = set()
    handles = [
        module.register_forward_pre_hook(lambda _, given: seen.add(given[0].shape[:-1]))
        for module in model.model.modules()
        if isinstance(module, MRotaryEmbedding)
    ]
    assert handles, "the model has no M-RoPE"
    assert prove(model).max_deviation < 1e-6
    for handle in handles:
        handle.remove()
    return seen


def test_the_forward_of_a_model_with_mrope_has_three_rows_and_passes_have_one(
    mrope: Loaded,
) -> None:
    assert rotations(mrope) == {(3,), ()}


def test_three_equal_rows_must_do_what_one_does(mrope: Loaded, monkeypatch: Patch) -> None:
    forward = MRotaryEmbedding.forward_native

    def width_is_another(self: Any, positions: torch.Tensor, *given: Any) -> Any:
        if positions.dim() == 2:
            positions = torch.stack([positions[0], positions[1], positions[2] // 2])
        return forward(self, positions, *given)

    monkeypatch.setattr(MRotaryEmbedding, "forward_native", width_is_another)
    for module in mrope.model.modules():
        if isinstance(module, MRotaryEmbedding):
            monkeypatch.setattr(module, "_forward_method", module.forward_native)
    with pytest.raises(RefusedError, match="does not turn with its position as its rotary module"):
        prove(mrope)
