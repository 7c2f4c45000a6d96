# SPDX-License-Identifier: Apache-2.0
"""Rows of the host region through pages on a GPU.

    store   pages ─ compute stream ─► staging ─ side stream ─► rows
    load    pages ◄─ compute stream ─ staging ◄─ side stream ─ rows

The side stream moves staging and rows only. The cache's pages are read and written on the compute
stream, behind the steps that came before and in front of those that follow, so nothing of it ever
waits for the host. Staging has two halves, so that one is copied while the other is read or
written; a half is free once whoever used it last is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from vllm_segreuse.model.cells import StoredPage, views
from vllm_segreuse.plan.arrays import IntArray
from vllm_segreuse.prefill.mover import CopyBlocks, LoadedRows, Mark

STAGING_BYTES = 128 << 20


class Streams(Protocol):
    """The compute stream, which is the current one, and a side stream."""

    def on_side(self) -> AbstractContextManager[Any]:
        """What is queued within goes to the side stream."""

    def record(self) -> Any:
        """An event behind all that was queued on the stream that is current."""

    def wait(self, event: Any) -> None:
        """What is queued next on the current stream runs once the event has passed."""


class GpuStreams:
    """Those of a GPU.

    Args:
        device: that has the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def on_side(self) -> AbstractContextManager[Any]:
        """See `Streams`."""
        return torch.cuda.stream(self._side)

    def record(self) -> Any:
        """See `Streams`."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Any) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self._device).wait_event(event)


@dataclass
class _Half:
    """Staging for some rows.

    Attributes:
        cells: int8 `[slots, cell_bytes]`.
        pages: the same as pages of each layer: `cells.views`.
        free: passes once its last use is over; None: it was not used yet.
    """

    cells: torch.Tensor
    pages: list[torch.Tensor]
    free: Any = None


class StagedMover:
    """A `Mover` for caches on a GPU.

    Args:
        copy: from the cache.
        stored: how pages of each layer lie in a cell.
        device: that has the cache.
        cells: int8 `[rows, cell_bytes]`, this rank's part of the host region.
        streams: of the device.
        staging_bytes: of both halves.
        zeroises: whether staging is zeroed behind each use.

    Attributes:
        streams, zeroises: as given.
    """

    def __init__(
        self,
        copy: CopyBlocks,
        stored: Sequence[StoredPage],
        device: torch.device,
        cells: torch.Tensor,
        streams: Streams,
        staging_bytes: int = STAGING_BYTES,
        zeroises: bool = False,
    ) -> None:
        self._copy, self._cells, self.streams = copy, cells, streams
        self._slots = min(max(1, staging_bytes // 2 // cells.shape[1]), len(cells))
        shape = self._slots, cells.shape[1]
        halves = [torch.empty(shape, dtype=torch.int8, device=device) for _ in range(2)]
        self._halves = [_Half(half, views(half, stored)) for half in halves]
        self._is_gpu = device.type != "cpu"
        self.zeroises = zeroises
        self._uses = 0

    @property
    def staging(self) -> list[torch.Tensor]:
        """Both halves, int8 `[slots, cell_bytes]` each; none once it is closed."""
        return [half.cells for half in self._halves]

    def _next(self) -> _Half:
        half = self._halves[self._uses % 2]
        self._uses += 1
        return half

    def store(self, blocks: IntArray, rows: IntArray) -> torch.Tensor | None:
        """See `Mover`."""
        encoded = None
        for first in range(0, len(rows), self._slots):
            chunk = np.asarray(rows[first : first + self._slots]).tolist()
            half = self._next()
            self._wait_until_free(half)
            stop = first + len(chunk)
            found = self._copy(half.pages, blocks[first:stop], np.arange(len(chunk)))
            if found is not None:
                if encoded is None:
                    encoded = torch.empty(len(rows), dtype=torch.bool, pin_memory=self._is_gpu)
                encoded[first:stop].copy_(found, non_blocking=True)
            copied = self.streams.record()
            with self.streams.on_side():
                self.streams.wait(copied)
                for slot, row in enumerate(chunk):
                    self._cells[row].copy_(half.cells[slot], non_blocking=True)
                self._used(half, len(chunk))
        return encoded

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        """See `Mover`."""
        for first in range(0, len(rows), self._slots):
            chunk = np.asarray(rows[first : first + self._slots]).tolist()
            half = self._next()
            with self.streams.on_side():
                self._wait_until_free(half)
                for slot, row in enumerate(chunk):
                    half.cells[slot].copy_(self._cells[row], non_blocking=True)
                copied = self.streams.record()
            self.streams.wait(copied)
            try:
                yield LoadedRows(first, first + len(chunk), half.pages, np.arange(len(chunk)))
            finally:
                self._used(half, len(chunk))

    def mark(self) -> Mark:
        """See `Mover`."""
        with self.streams.on_side():
            event: Mark = self.streams.record()
        return event

    def close(self) -> None:
        """See `Mover`."""
        self._cells = torch.empty(0, self._cells.shape[1], dtype=torch.int8)
        self._halves.clear()

    def _used(self, half: _Half, slots: int) -> None:
        """All of a use is queued on the current stream."""
        if self.zeroises:
            half.cells[:slots].zero_()
        half.free = self.streams.record()

    def _wait_until_free(self, half: _Half) -> None:
        if half.free is not None:
            self.streams.wait(half.free)
