# SPDX-License-Identifier: Apache-2.0
"""The second tier in the scheduler's process: what is stored, where it is, and who reads it.

    evicting ──► a step's orders ──► workers copy blocks to rows ──► shown in the index
    hold ──────► a step's plans ───► workers read rows ────────────► rows may be replaced

Rows, their order of replacement and their counts of readers are vLLM's (`TieringOffloadingManager`,
v1/kv_offload/tiering/manager.py). A row is reserved, or held, until each rank has reported the step
that writes or reads it, whatever becomes of requests meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import (
    Medium,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from segreuse_store import FileStore, GroupJournal, StoredRecord
from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.features.tier.catalogue import RecordCatalogue
from vllm_segreuse.features.tier.contexts import Contexts
from vllm_segreuse.features.tier.decoded import Decoded
from vllm_segreuse.features.tier.deleted import Deleted
from vllm_segreuse.features.tier.host_rows import HostRows
from vllm_segreuse.features.tier.keeping import Keeping
from vllm_segreuse.features.tier.loads import Held, Loads
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.record import Record, Seen, packed
from vllm_segreuse.plan import IntArray, ReusePlan, TierDone, TierOrders
from vllm_segreuse.scheduling.health import Health

logger = logging.getLogger("vllm.segreuse")

_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


@dataclass
class _Step:
    """Orders that not all ranks have reported.

    Attributes:
        context: of the stores; None: there are none.
        records: that are stored.
        reads: what plans read.
        verifies: whether workers look at the model's weights.
        reports: ranks that have reported.
        failed: whether copies failed on any.
        without_code: places of records that the codec cannot store on some rank.
        other_weights: whether any has other weights than at the start.
    """

    context: ReqContext | None
    records: list[Record]
    reads: list[Held]
    verifies: bool
    reports: int = 0
    failed: bool = False
    without_code: set[int] = field(default_factory=set)
    other_weights: bool = False


class RecordPlaces(NamedTuple):
    """Where the records of an engine lie.

    Attributes:
        manager: vLLM's, above the others.
        rows: of host memory.
        files: the store of files behind the manager, if there is one.
        journal: of the documents in the files.
    """

    manager: TieringOffloadingManager
    rows: HostRows
    files: FileStore | None = None
    journal: GroupJournal | None = None


class TierCounts(NamedTuple):
    """What there is now.

    Attributes:
        host, disk: records there.
        holds: requests and steps that hold records, or wait for them.
        steps: whose orders not all ranks have reported.
        jobs: of vLLM's manager.
    """

    host: int
    disk: int
    holds: int
    steps: int
    jobs: int


class TierStore(BlockListener):
    """One per engine; a `SecondTier`. Lives in the scheduler's thread.

    Args:
        places: where records lie.
        catalogue: of the records.
        ranks: that report orders.
        options: of the tier.
        reuse: health of segment reuse: what the index says of a block is not believed after an
            error there.
        stats: counts what happens.
        clock: seconds.

    Attributes:
        documents: of knowledge bases.
        catalogue, manager, rows, files: as given.
        loads: what requests hold.
        health: of the second tier; what is stored or read is nothing after an error.
    """

    def __init__(
        self,
        places: RecordPlaces,
        catalogue: RecordCatalogue,
        ranks: int,
        options: TierOptions,
        reuse: Health,
        stats: Counted,
        clock: Callable[[], float],
    ) -> None:
        manager, rows, files, journal = places
        self.first_entry = catalogue.first_entry
        self.min_run_tokens = options.min_run_tokens
        self.manager = manager
        self.rows = rows
        self.catalogue = catalogue
        self._ranks = ranks
        self._block_size = catalogue.block_size
        view = rows.get_kv_memoryview()
        self._row_bytes = view.nbytes // len(view)
        self._stores_evicted = options.admission == "evicted"
        self._stats = stats
        self._reuse = reuse
        self.health = Health("the second tier")
        capacity = max(len(view), 0 if files is None else files.num_slots)
        self.documents = Keeping(
            self, capacity, self.health, time.time, files, journal, catalogue.key_at
        )
        self.files = files
        self._contexts = Contexts(manager)
        wait_s = options.wait_ms / 1e3
        self.loads = Loads(manager, self._contexts, catalogue, self._follow, wait_s, clock, stats)
        self._evicted: list[Seen] = []
        self._deleted = Deleted(catalogue.first_entry, catalogue.key_at)
        self._rounds = options.is_lossy and self._stores_evicted
        self._decoded = Decoded(catalogue.first_entry)
        self._noted = 0, 0
        self._is_verified = True
        self._sequence = 0
        self._steps: dict[int, _Step] = {}
        self._stale: dict[int, _Step] = {}

    @property
    def is_open(self) -> bool:
        """Whether anything is stored or read. Not after an error; nor after a reset, before all
        ranks are done with the rows of what was there before."""
        return not (self.health.broken or self._reuse.broken or self._stale)

    def counts(self) -> TierCounts:
        """What there is now."""
        return TierCounts(
            self.catalogue.num_in_host,
            self.catalogue.num_on_disk,
            len(self.loads) + sum(len(step.reads) for step in self._steps.values()),
            len(self._steps) + len(self._stale),
            len(self._contexts),
        )

    # The block pool.

    def evicting(self, block_ids: Sequence[int]) -> None:
        """Store what donates, once the step is scheduled."""
        if self._stores_evicted and self.is_open:
            with self.health.contained("an eviction"):
                seen = self.catalogue.see(block_ids, evicted=True)
                seen, decoded = self._decoded.taken(block_ids, seen)
                wanted, deleted = self._deleted.split(seen)
                self._evicted += wanted
                for found in (*decoded, *deleted):
                    self.catalogue.done_with(found)
                if decoded:
                    self._stats.inc("tier_dropped_total", len(decoded), reason="decoded")

    def write_through(self, block_ids: Sequence[int]) -> list[bytes]:
        """Store blocks with the next step, whatever else is stored; their keys, in order. None are
        returned if any of the blocks cannot be stored."""
        if not self.is_open:
            return []
        seen = self.catalogue.see(block_ids, evicted=False)
        if len(seen) < len(block_ids):
            for found in seen:
                self.catalogue.done_with(found)
            return []
        self._evicted += seen
        keys = [found.key for found in seen]
        self.rows.keep(keys)
        self._deleted.kept(keys)
        return keys

    def erase(self, keys: Iterable[bytes]) -> None:
        """Records are not to stay in host memory, if it is zeroised."""
        deleted = list(keys)
        self._deleted.add(deleted, self.catalogue.step)
        self._evicted, unwanted = self._deleted.split(self._evicted)
        for found in unwanted:
            self.catalogue.done_with(found)
        self.rows.erase(deleted)
        self._follow()

    def erased_elsewhere(self, keys: Iterable[bytes]) -> None:
        """Another engine has deleted documents whose files were shared. What this one has read of
        them does not come back to the files."""
        self.erase([key for key in keys if not self.documents.is_durable(key)])

    def is_on_host(self, key: bytes) -> bool:
        """Whether a record is in host memory."""
        record = self.catalogue.get(key)
        return record is not None and record.in_host

    def describe(self, key: bytes) -> StoredRecord | None:
        """What files need to know of a record; None: it must not be written to any."""
        record = self.catalogue.get(key)
        if self.files is None or record is None or self.rows.is_erased(key):
            return None
        namespaces = self.catalogue.told(record)
        if namespaces is None:
            return None
        about = packed(record.about, [*map(self.files.digest, namespaces)])
        return StoredRecord(key, about, self.documents.is_durable(key))

    def close(self) -> None:
        """The engine ends: files are closed, and host memory is given back."""
        with self.health.contained("the end of the engine"):
            self.manager.shutdown()

    def reset(self) -> None:
        """Forget all records in host memory. What workers do with rows is over before any row is
        used again."""
        with self.health.contained("a reset"):
            self.health.recover()
            self._evicted = []
            self._deleted.clear()
            self._decoded.clear()
            self._stale |= self._steps
            self._steps = {}
            self.loads.clear()
            self.catalogue.clear()
            self.documents.cleared()
            self.manager.reset_cache()
            self._contexts.end_all()
            if self.files is not None:
                self.files.hide()  # the model may have other weights
                self._is_verified = False
            for _ in self.manager.take_events():
                pass
            self._flush_unless_in_use()

    def recall(self, namespace: int, key: bytes) -> None:
        """A request names a namespace: what files hold of it is found, from before the start or of
        another engine.

        Args:
            namespace: its id, which is in use.
        """
        if self.files is not None and self.is_open:
            with self.health.contained("the records of a namespace"):
                self.catalogue.restore(self.files.claim(key), namespace)

    # Plans.

    def exact_entry(self, name: bytes) -> int:
        """See `RecordCatalogue.exact_entry`; -1 unless the tier is open, too."""
        return self.catalogue.exact_entry(name) if self.is_open else -1

    def hold(self, request_id: str, entries: IntArray) -> IntArray | None:
        """See `SecondTier`."""
        if self.is_open:
            with self.health.contained("a lookup"):
                return self.loads.hold(request_id, entries)
        return np.full(len(entries), -1, np.int32)

    def let_go(self, request_id: str) -> None:
        """See `SecondTier`."""
        if self.is_open:
            with self.health.contained("the end of a plan"):
                self.loads.let_go(request_id)

    def sent(self, request_ids: Sequence[str]) -> None:
        """See `SecondTier`."""
        if self.is_open:
            with self.health.contained("the end of a step"):
                self.loads.sent(request_ids)

    def left(self, request_id: str) -> None:
        """See `SecondTier`."""
        if self.is_open:
            with self.health.contained("the end of a request"):
                self.loads.left(request_id)

    def note_plans(self, plans: Sequence[ReusePlan]) -> None:
        """Plans leave, with the blocks that they write."""
        if self._rounds and self.is_open:
            with self.health.contained("the end of a step"):
                self._decoded.note(plans, self._block_size)

    # Steps.

    def take_orders(self, runs_model: bool = True) -> TierOrders | None:
        """A step was scheduled, and its plans were sent: what the workers do for the tier in it.

        Args:
            runs_model: whether the model runs in it, so that its weights are there.
        """
        if not self.is_open:
            return None
        with self.health.contained("the end of a step"):
            evicted, self._evicted = self._evicted, []
            context, records, blocks, rows = self._place(evicted)
            self.manager.on_schedule_end(_STEP)
            self.rows.sweep()
            self._follow()
            self._offer()
            reads = self.loads.take_sent()
            for held in reads:
                self.documents.read(held.keys)
            self._note_sizes()
            verifies = runs_model and not self._is_verified
            if not (records or reads or verifies):
                return None
            self._is_verified |= verifies
            self._sequence += 1
            self._steps[self._sequence] = _Step(context, records, reads, verifies)
            return TierOrders(self._sequence, blocks, rows, verifies)
        return None

    @property
    def waiting(self) -> Sequence[Seen]:
        """Blocks that are stored with the next step, unless it finds their records stored."""
        return self._evicted

    @property
    def has_pending_work(self) -> bool:
        """Whether another step is needed: blocks wait to be copied, ranks have to report, rows of
        erased records are in use, or files need one."""
        waits = bool(self._evicted or self._steps) or self.rows.has_erased
        waits |= self.files is not None and self.files.needs_step
        return (self.is_open and waits) or bool(self._stale)

    def note(self, done: TierDone) -> None:
        """Workers have reported orders."""
        with self.health.contained("a report of the workers"):
            for sequence, ranks in sorted(done.ranks.items()):
                steps = self._steps if sequence in self._steps else self._stale
                if sequence not in steps:
                    continue  # an error has ended the tier
                step = steps[sequence]
                step.reports += ranks
                step.failed |= sequence in done.failed
                step.without_code |= {place for of, place in done.without_code if of == sequence}
                step.other_weights |= sequence in done.other_weights
                if step.reports >= self._ranks:
                    del steps[sequence]
                    if steps is self._steps:
                        self._finish(step)
                    else:
                        self._flush_unless_in_use()

    def _flush_unless_in_use(self) -> None:
        """Once all ranks are done with what a reset has freed: zero it, and let it be used. From
        0.33 on vLLM's manager reads no file into it before."""
        if not self._stale:
            self.rows.wipe()
            if hasattr(self.manager, "on_reset_flushed"):
                self.manager.on_reset_flushed()

    def _note_sizes(self) -> None:
        counts = {} if self.files is None else self.files.take_counts()
        for event, records in counts.items():
            self._stats.inc("tier_files_total", records, event=event)
        sizes = self.catalogue.num_in_host, self.catalogue.num_on_disk
        if sizes != self._noted:
            self._noted = sizes
            for tier, records in zip(("host", "disk"), sizes, strict=True):
                self._stats.set("tier_records", records, tier=tier)
                self._stats.set("tier_bytes", records * self._row_bytes, tier=tier)

    def _finish(self, step: _Step) -> None:
        for held in step.reads:
            self.loads.read(held)
        if step.verifies:
            self._reveal(step.other_weights)
        if step.context is None:
            return
        lost = set(range(len(step.records))) if step.failed else step.without_code
        stored = [record for i, record in enumerate(step.records) if i not in lost]
        keys = [OffloadKey(step.records[place].key) for place in sorted(lost)]
        if keys:
            reason = "failed" if step.failed else "codec"
            self._stats.inc("tier_dropped_total", len(keys), reason=reason)
            self.documents.dropped(keys)
        if stored:
            # The manager takes one report of a job; what it never got is the host tier's affair.
            self.rows.complete_store(keys, step.context, success=False)
            keys = [OffloadKey(record.key) for record in stored]
            self._stats.inc("tier_tokens_total", len(keys) * self._block_size, move="stored")
            self.catalogue.show([record for record in stored if not record.shown])
        self.manager.complete_store(keys, step.context, success=bool(stored))
        self._contexts.end(step.context)
        self._follow()
        for record in step.records:
            self.catalogue.stored(record)

    def _reveal(self, other_weights: bool) -> None:
        """Files are read again if the model has the weights that they are of."""
        assert self.files is not None
        if other_weights:
            logger.warning(
                "segment reuse: the model has other weights than at the start: files of the second "
                "tier are set aside until it has the same again, or is started anew"
            )
            return
        self.files.reveal()
        self.documents.revealed()

    def _place(
        self, evicted: Sequence[Seen]
    ) -> tuple[ReqContext | None, list[Record], IntArray, IntArray]:
        """Rows for what is not in host memory yet: the job, records, blocks and rows."""
        nothing = np.empty(0, np.int32)
        blocks = self._not_stored(evicted)
        if not blocks:
            return None, [], nothing, nothing
        context = self._contexts.begin()
        output = self._prepare(list(blocks), context)
        self._follow()
        keys = [] if output is None else output.keys_to_store
        records = [record for key in keys if (record := self.catalogue.get(key)) is not None]
        for key in blocks.keys() - set(keys):
            record = self.catalogue.get(key)
            if record is not None:
                self.catalogue.stored(record)
        if output is None or not records:
            self._contexts.end(context)
            return None, [], nothing, nothing
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        taken = np.asarray([blocks[key] for key in keys], np.int32)
        return context, records, taken, np.asarray(output.store_spec.chunk_ids, np.int32)

    def _not_stored(self, evicted: Sequence[Seen]) -> dict[OffloadKey, int]:
        """Blocks that are to be stored, by key; others are used, and known in more namespaces."""
        blocks: dict[OffloadKey, int] = {}
        used: list[OffloadKey] = []
        for seen in evicted:
            key = OffloadKey(seen.key)
            record = self.catalogue.get(seen.key)
            if record is None:
                record = self.catalogue.add(seen)
            else:
                self.catalogue.see_again(record, seen)
                self.catalogue.done_with(seen)
            if record.in_host:
                used.append(key)
            elif not record.storing:
                record.storing = True
                on_disk = record.on_disk or (self.files is not None and self.files.lookup(seen.key))
                self.catalogue.place(record, in_host=False, on_disk=on_disk)
                blocks[key] = seen.block
        if used:
            context = self._contexts.begin()
            self.manager.touch(used, context)
            self._contexts.end(context)
        return blocks

    def _offer(self) -> None:
        """Store the documents of host memory that files have not, and would take now. The manager
        stores in files only what comes to host memory, and only then."""
        if self.files is None:
            return
        keys = [OffloadKey(key) for key in self.files.take_wanted() if self.is_on_host(key)]
        if keys:
            context = self._contexts.begin()
            job = self.manager.create_store_job(keys, context)
            self.files.submit_store(job.job_id, job.keys, job.chunk_ids.tolist())
            self._contexts.end(context)

    def _prepare(self, keys: list[OffloadKey], context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for as many of the keys as there is room for."""
        while keys:
            output = self.manager.prepare_store(keys, context)
            if output is not None:
                return output
            half = len(keys) // 2
            self._stats.inc("tier_dropped_total", len(keys) - half, reason="full")
            self.documents.dropped(keys[half:])
            keys = keys[:half]
        return None

    def _follow(self) -> None:
        """Take note of what the manager and its tiers report: what they have, and have no more."""
        for event in self.manager.take_events():
            is_host = event.medium is Medium.CPU
            for key in event.keys:
                self.documents.moved(
                    key,
                    on_host=not event.removed if is_host else None,
                    on_disk=None if is_host else not event.removed,
                )
                record = self.catalogue.get(key)
                if record is None:
                    continue
                in_host, on_disk = record.in_host, record.on_disk
                if is_host:
                    in_host = not event.removed
                else:
                    on_disk = not event.removed
                self.catalogue.place(record, in_host=in_host, on_disk=on_disk)
