# SPDX-License-Identifier: Apache-2.0
"""Rows of a mixture, and what a model is given of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.kvlink import attention, mask
from recipes.kvlink.examples import Mixture
from recipes.kvlink.rows import UNLEARNT, Row, Writer


class Rows(torch.utils.data.Dataset[Row]):
    """Rows `start`, `start + 1`, .. of a mixture, `count` of all."""

    def __init__(self, mixture: Mixture, writer: Writer, start: int, count: int) -> None:
        self._mixture, self._writer = mixture, writer
        self._start, self._count = start, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        return self._writer.row(self._mixture.draw(self._start + index))


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
