# SPDX-License-Identifier: Apache-2.0
"""A model whose layers run by its own forward only, as plans of states run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from segreuse_extras.states.stack import StateStack
from tests.model.test_positions import Vision
from vllm_segreuse.model.modules import UnsupportedModelError


class Layer(nn.Module):
    """A decoder layer, with attention or without."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.mixer = nn.Linear(2, 2) if attends else nn.Identity()


class Text(nn.Module):
    """Decoder layers; the last of them attends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(False), Layer(True)])


class Wrapped(Vision):
    """A model that takes images: beside as many layers of its tower, it has those for text in a
    model of their own."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.tower = nn.ModuleList([Layer(True), Layer(True)])
        self.language_model = Text()
        self.given: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.given += [input_ids, positions]
        return input_ids.float()


def stack_of(model: Wrapped, uses_mrope: bool = True) -> StateStack:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(uses_mrope=uses_mrope, get_total_num_hidden_layers=lambda: 2)
    )
    attention = {"layers.1": model.language_model.layers[1].mixer}
    return StateStack(model, attention, config, 16)


def test_layers_for_text_are_found_beside_those_of_a_tower() -> None:
    model = Wrapped()
    stack = stack_of(model)
    assert stack.layers == [model.language_model.layers[1]]
    assert stack.attention == [model.language_model.layers[1].mixer]
    assert stack.num_layers == 2


@pytest.mark.parametrize(("uses_mrope", "rows"), [(True, (3,)), (False, ())])
def test_positions_are_as_many_rows_as_the_model_is_given_by_vllm(
    uses_mrope: bool, rows: tuple[int, ...]
) -> None:
    model = Wrapped()
    stack_of(model, uses_mrope).forward(torch.tensor([5, 6, 7]), torch.tensor([9, 10, 11]))
    token_ids, positions = model.given
    assert token_ids.dtype == torch.int32
    assert positions.shape == (*rows, 3)
    assert torch.equal(positions, torch.tensor([9, 10, 11]).expand(*rows, 3))


def test_a_model_that_numbers_text_otherwise_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not number the tokens of a text one by"):
        stack_of(Wrapped(behind=-3))
