# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks to rows of the host region, and rows as pages that plans can read.

On a CPU both are memory of the host: blocks are copied to rows, and rows are read where they lie.
On a GPU rows pass through pages on the device (`staging.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_segreuse.kernels.pages import indexable
from vllm_segreuse.plan.arrays import IntArray


class LoadedRows(NamedTuple):
    """Rows that the device can read.

    Attributes:
        first, stop: which of the rows that were asked for: `[first, stop)`.
        pages: of each layer `[slots, page_elements]`.
        slots: int64 `[stop - first]`, the page of each row.
    """

    first: int
    stop: int
    pages: list[torch.Tensor]
    slots: np.ndarray


class Mark(Protocol):
    """A point in the order of copies."""

    def query(self) -> bool:
        """Whether all that was ordered before it is over."""


class Mover(Protocol):
    """Between the pages of a KV cache and rows of host memory."""

    def store(self, blocks: IntArray, rows: IntArray) -> None:
        """Copy blocks to rows; what is queued later may write the blocks."""

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        """All of some distinct rows, a chunk at a time; the caller queues what reads a chunk before
        it asks for the next."""

    def mark(self) -> Mark | None:
        """Of what was ordered so far; None: all of it is over."""


def copy_pages(
    pages: Sequence[torch.Tensor], to: Sequence[torch.Tensor], blocks: IntArray, rows: IntArray
) -> None:
    """Copy whole pages of all layers, byte for byte.

    Args:
        pages: `[num_blocks, page_elements]` of each layer.
        to: `[rows, page_elements]` of each layer, on the same device.
        blocks, rows: `[n]`; no row twice.
    """
    device = pages[0].device
    source, target = (
        torch.from_numpy(np.asarray(which, np.int64)).to(device) for which in (blocks, rows)
    )
    for layer, copy in zip(pages, to, strict=True):
        indexable(copy)[target] = indexable(layer)[source]


class InPlace:
    """On a CPU: everything is over when it returns.

    Args:
        pages: `[num_blocks, page_elements]` of each layer.
        rows: the same layers' views of the host region.
    """

    def __init__(self, pages: Sequence[torch.Tensor], rows: list[torch.Tensor]) -> None:
        self._pages, self._rows = pages, rows

    def store(self, blocks: IntArray, rows: IntArray) -> None:
        """See `Mover`."""
        copy_pages(self._pages, self._rows, blocks, rows)

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        """See `Mover`."""
        yield LoadedRows(0, len(rows), self._rows, np.asarray(rows, np.int64))

    def mark(self) -> None:
        """See `Mover`."""
