# SPDX-License-Identifier: Apache-2.0
"""A region and a store of files that only remember what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from segreuse_store import JobResult, StoreEvent

ROW_BYTES = 16


def mark(content: Any) -> int:
    """What a cell holds of a content: never zero."""
    return 1 + hash(content) % 100


class Region:
    """Of host memory; a rank's cell of a row is a byte.

    Attributes:
        memory: int8 `[rows, ROW_BYTES]`.
    """

    def __init__(self, rows: int) -> None:
        self.num_chunks = rows
        self.total_size_bytes = rows * ROW_BYTES
        self.memory = np.zeros((rows, ROW_BYTES), np.int8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.memory)

    def cleanup(self) -> None:
        pass


class Transfer(NamedTuple):
    """A job under way; `loads`: it fills rows."""

    job_id: int
    keys: list[bytes]
    rows: list[int]
    loads: bool


class Files:
    """In place of a `FileStore`. Transfers end when `work` is called, and may fail.

    Attributes:
        content: what each key was stored with: the contents of its row on each rank.
        rows: of the host region, by rank: what they hold.
    """

    def __init__(self, region: Region, rows: list[dict[int, Any]], most: int = 10**6) -> None:
        self.content: dict[bytes, list[Any]] = {}
        self.memory = region.memory
        self.rows = rows
        self.num_slots = most
        self.hidden = False
        self.jobs: list[Transfer] = []
        self._results: list[JobResult] = []
        self._events: list[StoreEvent] = []

    def lookup(self, key: bytes) -> bool:
        return key in self.content and not self.hidden

    def submit_store(self, job_id: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        self.jobs.append(Transfer(job_id, [*keys], [*rows], loads=False))

    def submit_load(self, job_id: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        self.jobs.append(Transfer(job_id, [*keys], [*rows], loads=True))

    def work(self, fails: bool = False) -> None:
        """The oldest transfer ends."""
        if not self.jobs:
            return
        job = self.jobs.pop(0)
        done = []
        for key, row in zip(job.keys, job.rows, strict=True):
            if job.loads and key in self.content and not fails:
                for rank, held in enumerate(self.content[key]):
                    self.rows[rank][row] = held
                    self.memory[row, rank] = mark(held)
                done.append(key)
            elif job.loads:
                for held in self.rows:
                    held[row] = None
                self.memory[row] = -1  # written by half
            elif not fails:
                self.content[key] = [held.get(row) for held in self.rows]
                self._event([key], removed=False)
        while len(self.content) > self.num_slots:
            self.lose(next(iter(self.content)))
        success = len(done) == len(job.keys) if job.loads else not fails
        self._results.append(JobResult(job.job_id, success, done, 0.0))

    def take_counts(self) -> Counter[str]:
        return Counter()

    def claim(self, label: bytes) -> Iterable[Any]:
        return ()

    def digest(self, label: bytes) -> bytes:
        return label[:16].rjust(16)

    def records(self) -> Iterable[Any]:
        return ()

    def set_durable(self, keys: Iterable[bytes], durable: bool) -> None:
        pass

    def take_wanted(self) -> list[bytes]:
        return []

    needs_step = False

    def erase(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self.content:
                self.lose(key)

    def hide(self) -> None:
        self.hidden = True

    def reveal(self) -> None:
        self.hidden = False

    def lose(self, key: bytes) -> None:
        """A file is gone."""
        del self.content[key]
        self._event([key], removed=True)

    def _event(self, keys: list[bytes], removed: bool) -> None:
        self._events.append(StoreEvent(keys, removed))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        taken, self._results = self._results, []
        return taken

    def take_events(self) -> Iterable[StoreEvent]:
        taken, self._events = self._events, []
        return taken

    def touch(self, keys: Iterable[bytes]) -> None:
        pass

    def has_pending_work(self) -> bool:
        return False

    def drain_jobs(self) -> None:
        while self.jobs:
            self.work()

    def shutdown(self) -> None:
        pass
