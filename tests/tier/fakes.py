# SPDX-License-Identifier: Apache-2.0
"""A region, a file tier and a pool of blocks that only remember what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

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


class Files(SecondaryTierManager):
    """Transfers end when `work` is called, and may fail.

    Attributes:
        content: what each key was stored with: the contents of its row on each rank.
        rows: of the host region, by rank: what they hold.
    """

    medium = Medium.STORAGE

    def __init__(self, region: Region, rows: list[dict[int, Any]], most: int = 10**6) -> None:
        super().__init__(None, region.create_kv_memoryview(), "fake files")  # type: ignore[arg-type]
        self.content: dict[OffloadKey, list[Any]] = {}
        self.memory = region.memory
        self.rows = rows
        self.num_slots = most
        self.hidden = False
        self.jobs: list[TransferJob] = []
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if self.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.jobs.append(job_metadata)

    submit_load = submit_store

    def work(self, fails: bool = False) -> None:
        """The oldest transfer ends."""
        if not self.jobs:
            return
        job = self.jobs.pop(0)
        done = []
        for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            if job.is_promotion and key in self.content and not fails:
                for rank, held in enumerate(self.content[key]):
                    self.rows[rank][row] = held
                    self.memory[row, rank] = mark(held)
                done.append(key)
            elif job.is_promotion:
                for held in self.rows:
                    held[row] = None
                self.memory[row] = -1  # written by half
            elif not fails:
                self.content[key] = [held.get(row) for held in self.rows]
                self._event([key], removed=False)
        while len(self.content) > self.num_slots:
            self.lose(next(iter(self.content)))
        success = not fails if not job.is_promotion else len(done) == len(job.keys)
        self._results.append(JobResult(job.job_id, success, done if job.is_promotion else None))

    def has(self, key: bytes) -> bool:
        return key in self.content and not self.hidden

    def take_counts(self) -> Counter[str]:
        return Counter()

    def records_in(self, namespace: bytes) -> Iterable[Any]:
        return ()

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
                self.lose(OffloadKey(key))

    def hide(self) -> None:
        self.hidden = True

    def reveal(self) -> None:
        self.hidden = False

    def lose(self, key: OffloadKey) -> None:
        """A file is gone."""
        del self.content[key]
        self._event([key], removed=True)

    def _event(self, keys: list[OffloadKey], removed: bool) -> None:
        self._events.append(OffloadingEvent(keys, Medium.STORAGE, removed))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        taken, self._results = self._results, []
        return taken

    def take_events(self) -> Iterable[OffloadingEvent]:
        taken, self._events = self._events, []
        return taken

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        pass

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        while self.jobs:
            self.work()

    def shutdown(self) -> None:
        pass
