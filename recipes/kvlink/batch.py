# SPDX-License-Identifier: Apache-2.0
"""Rows of a mixture, and what a model is given of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.kvlink import attention, mask
from recipes.kvlink.examples import Mixture
from recipes.kvlink.rows import UNLEARNT, Row, Writer

SORTED_STEPS = 16
"""Rows of so many steps are sorted by their length."""


class Rows(torch.utils.data.Dataset[Row]):
    """Rows `start`, `start + 1`, .. of a mixture, `count` of all; rows of a step are about equally
    long, so that little of it is padding.

    Args:
        step: rows of a step.
    """

    def __init__(self, mixture: Mixture, writer: Writer, start: int, count: int, step: int) -> None:
        self._mixture, self._writer = mixture, writer
        self._start, self._count = start, count
        self._sorted, self._window = step * SORTED_STEPS, -1
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        window, place = divmod(self._start + index, self._sorted)
        if window != self._window:
            numbers = range(window * self._sorted, (window + 1) * self._sorted)
            rows = (self._writer.row(self._mixture.draw(number)) for number in numbers)
            self._rows, self._window = sorted(rows, key=len), window
        return self._rows[place]


class Collator:
    """Rows as a model's arguments, padded on the right.

    Args:
        model: for the rotary embedding, if there are anchors.
        pad: token of the padding.
        has_anchors: whether keys are there twice.
        is_flex: the mask is one of flex_attention.
    """

    def __init__(self, model: Any, pad: int, has_anchors: bool, is_flex: bool) -> None:
        self._model, self._pad = model, pad
        self._has_anchors, self._is_flex = has_anchors, is_flex

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        length = max(map(len, rows))
        if self._is_flex:
            length += -length % 128  # blocks of flex_attention

        def padded(name: str, value: int = 0) -> Tensor:
            lists = [getattr(row, name) for row in rows]
            return torch.tensor([one + [value] * (length - len(one)) for one in lists])

        places = mask.Places(*(padded(n) for n in ("document", "branch", "chunk", "anchor")))
        batch = {
            "input_ids": padded("token", self._pad),
            "position_ids": padded("position"),
            "labels": padded("label", UNLEARNT),
        }
        device = self._model.device
        if self._is_flex:
            on_device = mask.Places(*(getattr(places, name).to(device) for name in vars(places)))
            batch["attention_mask"] = mask.block_mask(on_device, self._has_anchors)
        else:
            dtype = torch.bfloat16 if self._model.dtype == torch.bfloat16 else torch.float32
            batch["attention_mask"] = mask.additive(places, self._has_anchors, dtype)
        if self._has_anchors:
            batch["moved"] = attention.angles(self._model, padded("shift").to(device))
        return batch
