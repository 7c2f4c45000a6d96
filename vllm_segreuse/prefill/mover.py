# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks to rows of the host region, and rows as pages that plans can read.

On a CPU both are memory of the host: blocks are copied to rows, and rows are read where they lie.
On a GPU rows pass through pages on the device (`features/tier/staging.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_segreuse.plan.arrays import IntArray

CopyBlocks = Callable[[Sequence[torch.Tensor], IntArray, IntArray], "torch.Tensor | None"]
"""`copy(to, blocks, rows)`: whole pages of the cache to pages of each layer elsewhere, on its
device; no row twice (`Aligner.copy_blocks`). It returns what `Mover.store` does, on that device."""


class LoadedRows(NamedTuple):
    """Rows that the device can read.

    Attributes:
        first, stop: which of the rows that were asked for: `[first, stop)`.
        pages: of each layer `[slots, page_elements]`, or as the codec stores them.
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

    def store(self, blocks: IntArray, rows: IntArray) -> torch.Tensor | None:
        """Copy blocks to rows; what is queued later may write the blocks.

        Returns:
            Which blocks the codec could store, bool `[n]` in host memory; the rows of others are
            undefined. Read it once a later mark is reached. None: all of them.
        """

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        """All of some distinct rows, a chunk at a time; the caller queues what reads a chunk before
        it asks for the next."""

    def mark(self) -> Mark | None:
        """Of what was ordered so far; None: all of it is over."""

    def close(self) -> None:
        """Let go of the rows, so that their memory can be given back. Nothing is copied after."""


class InPlace:
    """On a CPU: everything is over when it returns.

    Args:
        copy: from the cache.
        rows: the layers' views of the host region.
    """

    def __init__(self, copy: CopyBlocks, rows: list[torch.Tensor]) -> None:
        self._copy, self._rows = copy, rows

    def store(self, blocks: IntArray, rows: IntArray) -> torch.Tensor | None:
        """See `Mover`."""
        return self._copy(self._rows, blocks, rows)

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        """See `Mover`."""
        yield LoadedRows(0, len(rows), self._rows, np.asarray(rows, np.int64))

    def mark(self) -> None:
        """See `Mover`."""

    def close(self) -> None:
        """See `Mover`."""
        self._rows.clear()
