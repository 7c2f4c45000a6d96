# SPDX-License-Identifier: Apache-2.0
"""Which token of a row sees which: documents themselves only, everything else what stands before.

A question sees no other question of its row, so that each is computed as in a prompt of its own.
Of a compressed document others see the anchors only, moved to where they stand in a prompt: keys of
a row with anchors are there twice, as computed and moved (`attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """What decides the mask: int64 `[rows, length]` each.

    Attributes:
        document: number of a token's document, from 1; 0 outside of documents.
        branch: number of its question, from 1; 0 in front of the questions.
        chunk: number of the chunk it was computed with, from 1, all of a row told apart; 0 for
            tokens of no chunk.
        anchor: 1 for anchors.
    """

    document: Tensor
    branch: Tensor
    chunk: Tensor
    anchor: Tensor

    def sees(self, row: Tensor, query: Tensor, key: Tensor, moved: Tensor) -> Tensor:
        """Whether `query` sees `key`, of tensors that broadcast.

        Args:
            row: index of the row.
            query, key: indices into the length.
            moved: whether the key is meant as it stands in a prompt, or as it was computed.
        """
        document, branch, chunk = self.document, self.branch, self.chunk
        of_query = document[row, query]
        shared = (branch[row, key] == 0) | (branch[row, key] == branch[row, query])
        own_document = (of_query == 0) | (document[row, key] == of_query)
        own_chunk = chunk[row, key] == chunk[row, query]
        as_moved = (self.anchor[row, key] > 0) & ~own_chunk
        as_computed = (chunk[row, key] == 0) | own_chunk
        in_frame = (moved & as_moved) | (~moved & as_computed)
        return (key <= query) & shared & own_document & in_frame


def seen(places: Places, with_moved: bool) -> Tensor:
    """bool `[rows, 1, length, keys]`; `keys` are twice the length if there are moved ones."""
    rows, length = places.document.shape
    device = places.document.device
    row = torch.arange(rows, device=device)[:, None, None]
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(2 * length if with_moved else length, device=device)
    result: Tensor = places.sees(row, query, key % length, key >= length)
    return result[:, None]


def additive(places: Places, with_moved: bool, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, the least number where not: `[rows, 1, length, keys]`."""
    hidden = ~seen(places, with_moved)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def block_mask(places: Places, with_moved: bool) -> Any:
    """The same for torch's flex_attention, which leaves out blocks that nobody sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = places.document.shape

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return places.sees(row, query, key % length, key >= length)

    keys = 2 * length if with_moved else length
    device = places.document.device
    return create_block_mask(mask_mod, rows, None, length, keys, device=device)
