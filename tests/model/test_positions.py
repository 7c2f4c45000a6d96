# SPDX-License-Identifier: Apache-2.0
"""Positions of text are asked of the model, and must be those of plain RoPE in every row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.positions import position_rows

MROPE: Any = SimpleNamespace(uses_mrope=True)


class Vision(nn.Module):
    """vLLM's `SupportsMRoPE`.

    Args:
        rows: of positions.
        change: what is done to them, `[rows, tokens]`.
        behind: by how much generated text is numbered otherwise.
    """

    def __init__(self, rows: int = 3, change: Any = None, behind: int = 0) -> None:
        super().__init__()
        self._rows, self._change, self._behind = rows, change, behind

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        assert mm_features == []
        positions = torch.arange(len(input_tokens)).repeat(self._rows, 1)
        if self._change is not None:
            self._change(positions)
        return positions, self._behind


def test_a_model_with_plain_rope_takes_one_row() -> None:
    assert position_rows(nn.Linear(1, 1), SimpleNamespace(uses_mrope=False)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [3, 4])
def test_rows_are_those_that_the_model_gives_to_text(rows: int) -> None:
    assert position_rows(Vision(rows), MROPE) == rows


@pytest.mark.parametrize(
    "model",
    [
        Vision(change=lambda p: p[1, 40].add_(1)),
        Vision(change=lambda p: p[2].mul_(2)),
        Vision(change=lambda p: p.add_(1)),
        Vision(behind=-3),
    ],
    ids=["one height", "width", "from one on", "generated text"],
)
def test_text_that_is_numbered_otherwise_is_refused(model: Vision) -> None:
    with pytest.raises(UnsupportedModelError, match="Vision does not number the tokens of a text"):
        position_rows(model, MROPE)


def test_a_model_without_positions_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear gives no multimodal rotary positions"):
        position_rows(nn.Linear(1, 1), MROPE)
