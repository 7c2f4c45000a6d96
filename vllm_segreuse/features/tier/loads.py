# SPDX-License-Identifier: Apache-2.0
"""Which rows of host memory plans read, and which requests wait for records from files.

hold ──► held by the request ──► sent: held by the step ──► all workers have read it
  │            └ let_go: the plan is not carried out
  └ records come from files: ask again, up to `wait_s`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.features.tier.catalogue import RecordCatalogue
from vllm_segreuse.features.tier.contexts import Contexts
from vllm_segreuse.features.tier.record import Record
from vllm_segreuse.plan import IntArray

_COMING = (LookupResult.HIT_PENDING, LookupResult.RETRY)


class Held(NamedTuple):
    """Records that cannot leave host memory."""

    context: ReqContext
    keys: list[OffloadKey]


class _Wait(NamedTuple):
    context: ReqContext
    since_s: float


class Loads:
    """One per engine.

    Args:
        manager: vLLM's, which knows the rows.
        contexts: of its jobs.
        catalogue: of the records.
        follow: has the catalogue follow what the manager reports.
        wait_s: longest time that a request waits.
        clock: seconds.
        stats: counts waits, and what plans read.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        contexts: Contexts,
        catalogue: RecordCatalogue,
        follow: Callable[[], None],
        wait_s: float,
        clock: Callable[[], float],
        stats: Counted,
    ) -> None:
        self._manager = manager
        self._contexts = contexts
        self._catalogue = catalogue
        self._follow = follow
        self._wait_s = wait_s
        self._clock = clock
        self._stats = stats
        self._held: dict[str, Held] = {}
        self._waits: dict[str, _Wait] = {}
        self._waited: set[str] = set()  # their wait is over, and nobody waits twice
        self._sent: list[Held] = []

    def __len__(self) -> int:
        """Requests that hold records, or wait for them."""
        return len(self._held) + len(self._waits) + len(self._sent)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request holds records, for a plan that was not sent."""
        return request_id in self._held

    def hold(self, request_id: str, entries: IntArray) -> IntArray | None:
        """See `SecondTier`."""
        records = [self._catalogue.at(entry) for entry in entries.tolist()]
        absent = [record for record in records if not record.in_host]
        if absent and self._is_coming(request_id, absent):
            return None
        self._end_wait(request_id)
        keys = [OffloadKey(record.key) for record in records if record.in_host]
        rows = np.full(len(records), -1, np.int32)
        if keys:
            context = self._contexts.begin()
            spec = self._manager.prepare_load(keys, context)
            assert isinstance(spec, CPULoadStoreSpec)
            rows[[record.in_host for record in records]] = spec.chunk_ids
            self._held[request_id] = Held(context, keys)
        return rows

    def _is_coming(self, request_id: str, absent: Sequence[Record]) -> bool:
        """Whether it is worth waiting for records; begins to read those that are in files."""
        if request_id in self._waited:
            return False
        now = self._clock()
        wait = self._waits.get(request_id)
        if wait is None:
            wait = self._waits[request_id] = _Wait(self._contexts.begin(), now)
        elif now - wait.since_s >= self._wait_s:
            return False
        look_up = self._manager.lookup
        found = [look_up(OffloadKey(record.key), wait.context) for record in absent]
        self._follow()
        return any(result in _COMING for result in found)

    def let_go(self, request_id: str) -> None:
        """See `SecondTier`."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self.read(held)

    def sent(self, request_ids: Sequence[str]) -> None:
        """See `SecondTier`."""
        for request_id in request_ids:
            held = self._held.pop(request_id, None)
            if held is not None:
                self._sent.append(held)
                tokens = len(held.keys) * self._catalogue.block_size
                self._stats.inc("tier_tokens_total", tokens, move="loaded")
            self._forget_wait(request_id)

    def take_sent(self) -> list[Held]:
        """What the plans of this step read."""
        taken, self._sent = self._sent, []
        return taken

    def read(self, held: Held) -> None:
        """All have read it: it may leave host memory."""
        self._manager.complete_load(held.keys, held.context)
        self._contexts.end(held.context)

    def left(self, request_id: str) -> None:
        """See `SecondTier`."""
        self.let_go(request_id)
        self._forget_wait(request_id)

    def clear(self) -> None:
        """The manager has forgotten everything."""
        for kept in (self._held, self._waits, self._waited, self._sent):
            kept.clear()

    def _end_wait(self, request_id: str) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._stats.observe("tier_wait_seconds", self._clock() - wait.since_s)
            self._contexts.end(wait.context)
            self._waited.add(request_id)

    def _forget_wait(self, request_id: str) -> None:
        self._end_wait(request_id)
        self._waited.discard(request_id)
