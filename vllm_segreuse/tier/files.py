# SPDX-License-Identifier: Apache-2.0
"""The file tier: a secondary tier of vLLM's `TieringOffloadingManager` (vllm/v1/kv_offload).

vLLM's own file tier (`tiering/fs`) has no budget, no checksums and no syncs. This one keeps records
by `folder.py` within a budget, and answers what it has from memory.

The scheduler's thread calls every method, and owns what is counted here. It makes no system call:
the I/O threads of `jobs.py` do, get all that they need with a task, and return how to settle it.
While a task hangs, nothing is offered and nothing is stored.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

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

from vllm_segreuse.supported import RefusedError
from vllm_segreuse.tier.catalogue import StoredRecord
from vllm_segreuse.tier.folder import LostError, RecordFolder
from vllm_segreuse.tier.format import Kept, record_of
from vllm_segreuse.tier.jobs import Job, Jobs, Settle
from vllm_segreuse.tier.journal import DocumentJournal
from vllm_segreuse.tier.residents import Residents, Slot
from vllm_segreuse.tier.sealing import Checksum, Sealer
from vllm_segreuse.tier_options import TierOptions

logger = logging.getLogger("vllm.segreuse")

KEY_ENV = "SEGREUSE_TIER_KEY"
DEADLINE_S = 30.0
PAUSES_S = (1.0, 300.0)
"""Writes pause after an error: for so long at first, twice as long each time, so long at most."""

LOST = ("missing", "torn", "corrupt")
"""Reasons for which a record is removed: see `LostError`."""

_DOCUMENTS = "documents.sqlite"
_TASK_RECORDS = 16
_MOST_NOTES = 1024

Describe = Callable[[bytes], StoredRecord | None]
Item = TypeVar("Item")


class _Coming(NamedTuple):
    record: StoredRecord
    row: int
    slot: Slot


class FileTier(SecondaryTierManager):
    """Records in files.

    Attributes:
        counts: what became of records, by reason: `stored`, `loaded`, `removed` for others; not
            stored: `full` (of records that may not be removed), `busy`, `paused`, `no_space`,
            `io_error`; not loaded: `missing`, `torn`, `corrupt`, `unreadable`; either: `stalled`.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        primary_kv_view: memoryview,
        folder: RecordFolder,
        budget_bytes: int,
        describe: Describe,
        io_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over an open store.

        Args:
            primary_kv_view: the host region, `[rows, row_bytes]`.
            folder: the store.
            budget_bytes: most bytes that files take on the device.
            describe: what is known of a key that is to be stored; None: it is not stored.
            io_threads: threads that read and write.
            clock: seconds.

        Raises:
            OSError: what is above the budget could not be removed.
        """
        super().__init__(None, primary_kv_view, "segreuse_files")
        self._rows = np.asarray(primary_kv_view)
        self._folder = folder
        self._describe = describe
        self._clock = clock
        self._residents = Residents(budget_bytes // folder.record_bytes, folder.at_start)
        folder.remove(self._residents.excess())
        self._jobs = Jobs(io_threads, DEADLINE_S, clock)
        # Rows that are being stored cannot be used for anything else.
        self._most_coming = max(1, len(self._rows) // 2)
        self._coming: set[bytes] = set()
        self._erased: set[bytes] = set()
        self._used: dict[str, float] = {}
        self._durable: dict[str, bool] = {}
        self._events: list[OffloadingEvent] = []
        self._hidden = False
        self._closed = False
        self._journal: DocumentJournal | None = None
        self._paused_until_s = -float("inf")
        self._pause_s = PAUSES_S[0]
        self._unnamed = self._by_namespace()
        self.counts: Counter[str] = Counter()

    # What is there.

    @property
    def used_bytes(self) -> int:
        """Bytes of the device that are taken, by what is written and removed just now, too."""
        return self._residents.used * self._folder.record_bytes

    @property
    def num_records(self) -> int:
        """Records that are on disk."""
        return len(self._residents)

    def has(self, key: bytes) -> bool:
        """Whether a record can be loaded."""
        usable = not (self._hidden or self._jobs.stalled)
        return usable and self._residents.get(key) is not None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS, from memory."""
        return LookupResult.HIT if self.has(key) else LookupResult.MISS

    def records(self) -> Iterator[StoredRecord]:
        """All records, from the least to the most recently used, and durable ones last.

        Digests stand in for their namespaces, whose keys are not on disk.
        """
        return map(record_of, self._residents)

    def records_in(self, namespace: bytes) -> list[StoredRecord]:
        """The records of a namespace that were there at the start, or when they were revealed.

        To be called when a request first names the namespace: later calls return nothing.

        Args:
            namespace: its key; the only one that the records have.
        """
        if self._hidden:
            return []
        keys = self._unnamed.pop(self._folder.digest(namespace), ())
        found = [kept for key in keys if (kept := self._residents.get(key)) is not None]
        return [record_of(kept)._replace(namespaces=(namespace,)) for kept in found]

    def _by_namespace(self) -> dict[bytes, list[bytes]]:
        found: dict[bytes, list[bytes]] = defaultdict(list)
        for record in self.records():
            for digest in record.namespaces:
                found[digest].append(record.key)
        return found

    def hide(self) -> None:
        """Offers and stores nothing: the model may have other weights from here on."""
        self._hidden = True

    def reveal(self) -> None:
        """The model has the weights whose fingerprint the store has."""
        self._hidden = False
        self._unnamed = self._by_namespace()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The records were used."""
        for key in keys:
            if (kept := self._residents.touch(key)) is not None:
                self._used[kept.name] = time.time()

    def set_durable(self, keys: Iterable[bytes], durable: bool) -> None:
        """Durable records are not removed for others that are not."""
        for key in keys:
            if (kept := self._residents.set_durable(key, durable)) is not None:
                self._durable[kept.name] = durable

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What has come to be on disk, and what is no longer."""
        events, self._events = self._events, []
        return events

    def _event(self, keys: list[bytes], removed: bool) -> None:
        if keys:
            offloaded = [OffloadKey(key) for key in keys]
            self._events.append(OffloadingEvent(offloaded, Medium.STORAGE, removed))

    # Stores.

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Stores what is new, may be stored, and has room."""
        pairs = zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)
        coming = [found for key, row in pairs if (found := self._admitted(key, row)) is not None]
        tasks = [partial(self._store, batch) for batch in self._split(coming)]
        self._jobs.begin(job_metadata.job_id, tasks, urgent=False)

    def _split(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Every thread gets a part; large jobs are more parts than threads."""
        share = -(-len(items) // self._jobs.num_threads)
        size = max(1, min(_TASK_RECORDS, share))
        return (items[i : i + size] for i in range(0, len(items), size))

    def _admitted(self, key: OffloadKey, row: int) -> _Coming | None:
        if self._hidden or key in self._coming or self._residents.touch(key) is not None:
            return None
        record = self._describe(key)
        if record is None:
            return None
        refusal = self._refusal(record.durable)
        slot = None if refusal else self._residents.reserve(record.durable)
        if slot is None:
            self.counts[refusal or "full"] += 1
            return None
        if slot.victim is not None:
            self._removed([slot.victim.key])
        self._coming.add(key)
        return _Coming(record, row, slot)

    def _refusal(self, durable: bool) -> str | None:
        """Why a record is not stored now. Durable ones may hold every row meanwhile: what is not
        written is lost when its row is replaced."""
        if self._jobs.stalled:
            return "stalled"
        if self._clock() < self._paused_until_s:
            return "paused"
        return "busy" if len(self._coming) >= self._most_coming and not durable else None

    def _store(self, batch: Sequence[_Coming], job: Job) -> Settle:
        payloads: list[bytes] = []
        victims = [coming.slot.victim for coming in batch]

        def copy() -> None:
            payloads.extend(self._rows[coming.row].tobytes() for coming in batch)

        left: Sequence[Kept | None] = victims
        new: list[Kept] = []
        try:
            if not job.use_rows(copy):
                return partial(self._not_stored, batch, left, None, job)
            self._folder.remove([victim for victim in victims if victim is not None])
            left = [None] * len(batch)
            new = [self._folder.new(coming.record) for coming in batch]
            self._folder.write(list(zip(new, payloads, strict=True)))
        except Exception as error:
            left = self._cleared(new) if new else left
            return partial(self._not_stored, batch, left, error, job)
        return partial(self._stored, batch, new)

    def _cleared(self, records: list[Kept]) -> list[Kept] | list[None]:
        """What is left of records after they were removed: all, or nothing."""
        try:
            self._folder.remove(records)
        except Exception:
            return records
        return [None] * len(records)

    def _stored(self, batch: Sequence[_Coming], new: list[Kept]) -> None:
        for kept in new:
            self._residents.fill(kept)
        self._pause_s = PAUSES_S[0]
        self.counts["stored"] += len(new)
        self._event([kept.key for kept in new], removed=False)
        self._no_longer_coming(batch)

    def _not_stored(
        self,
        batch: Sequence[_Coming],
        left: Sequence[Kept | None],
        error: Exception | None,
        job: Job,
    ) -> None:
        """
        Args:
            batch: what was to be stored.
            left: what each slot still has.
            error: None: the job was abandoned before.
            job: of the batch.
        """
        job.failed = True
        for kept in left:
            self._end_slot(kept)
        self._no_longer_coming(batch)
        if error is None:
            self.counts["stalled"] += len(batch)
            return
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.counts["no_space" if full else "io_error"] += len(batch)
        self._paused_until_s = self._clock() + self._pause_s
        logger.warning(
            "segment reuse: %d records could not be written to %s (%s): no more are for %g s",
            *(len(batch), self._folder.path, error, self._pause_s),
        )
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])

    def _end_slot(self, left: Kept | None) -> None:
        if left is None:
            self._residents.vacate()
        else:
            self._residents.block(left)

    def _no_longer_coming(self, batch: Sequence[_Coming]) -> None:
        keys = {coming.record.key for coming in batch}
        self._coming -= keys
        if erased := keys & self._erased:
            self._erased -= erased
            self.erase(erased)

    # Loads.

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fills rows with records, each verified before."""
        pairs = list(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        found = [
            (kept, row)
            for key, row in pairs
            if self.has(key) and (kept := self._residents.begin_read(key)) is not None
        ]
        tasks = [partial(self._load, batch) for batch in self._split(found)]
        job = self._jobs.begin(job_metadata.job_id, tasks, urgent=True)
        if lost := len(pairs) - len(found):
            job.failed = True
            self.counts["stalled" if self._jobs.stalled else "missing"] += lost

    def _load(self, batch: Sequence[tuple[Kept, int]], job: Job) -> Settle:
        outcomes = [(kept, self._loaded(kept, row, job)) for kept, row in batch]
        lost = [kept for kept, reason in outcomes if reason in LOST]
        left = {kept.name for kept in self._cleared(lost) if kept is not None}
        return partial(self._settle_load, outcomes, left, job)

    def _loaded(self, kept: Kept, row: int, job: Job) -> str | None:
        """Why the row was not filled, or None."""

        def copy() -> None:
            self._rows[row] = np.frombuffer(memoryview(payload), dtype=self._rows.dtype)

        try:
            payload = self._folder.read(kept)
            return None if job.use_rows(copy) else "stalled"
        except LostError as error:
            return error.reason
        except Exception as error:
            logger.warning(
                "segment reuse: a record could not be read from %s: %s", self._folder.path, error
            )
            return "unreadable"

    def _settle_load(
        self, outcomes: Sequence[tuple[Kept, str | None]], left: set[str], job: Job
    ) -> None:
        for kept, reason in outcomes:
            self._residents.end_read(kept.key)
            self.counts[reason or "loaded"] += 1
            if reason is None:
                job.loaded.append(OffloadKey(kept.key))
                continue
            job.failed = True
            if reason != "stalled":
                # What cannot be read is still there: it is the first to make room.
                self._lose(kept, kept if reason == "unreadable" or kept.name in left else None)

    def _lose(self, kept: Kept, left: Kept | None) -> None:
        found = self._residents.get(kept.key)
        if found is not None and found.name == kept.name:
            self._residents.release(kept.key)
            self._end_slot(left)
            self._removed([kept.key])

    # Both.

    def erase(self, keys: Iterable[bytes]) -> None:
        """Removes records, and with their rows what could open their files, for good."""
        leaving = []
        for key in keys:
            if key in self._coming:
                self._erased.add(key)
            elif (slot := self._residents.release(key)) is not None and slot.victim is not None:
                leaving.append(slot.victim)
        if leaving:
            self._removed([kept.key for kept in leaving])
            self._jobs.begin(None, [partial(self._erase, leaving)], urgent=False)

    def _erase(self, leaving: list[Kept], job: Job) -> Settle:
        left = self._cleared(leaving)
        try:
            self._folder.erase_removed()
        except Exception as error:
            logger.warning(
                "segment reuse: keys of erased records may still be in free pages of %s: %s",
                *(self._folder.path, error),
            )
        return partial(self._settle_slots, left)

    def _settle_slots(self, left: Sequence[Kept | None]) -> None:
        for kept in left:
            self._end_slot(kept)

    def _removed(self, keys: list[bytes]) -> None:
        self.counts["removed"] += len(keys)
        self._event(keys, removed=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What is over since the last call."""
        results = self._jobs.results()
        if len(self._used) >= _MOST_NOTES or self._durable:
            self._note()
        return results

    def _note(self) -> None:
        used, self._used = self._used, {}
        durable, self._durable = self._durable, {}

        def note(job: Job) -> Settle:
            try:
                self._folder.note(used, durable)
            except Exception as error:
                return partial(logger.warning, "segment reuse: %s", error)
            return lambda: None

        self._jobs.begin(None, [note], urgent=False)

    def has_pending_work(self) -> bool:
        """Whether a job is not reported yet."""
        return self._jobs.pending

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing is kept of requests."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Waits until all jobs are over, or abandoned at their deadline."""
        self._jobs.drain()

    def journal(self) -> DocumentJournal:
        """Of the documents that records are of, beside them."""

        def submit(write: Callable[[], None]) -> None:
            def task(job: Job) -> Settle:
                write()
                return lambda: None

            self._jobs.begin(None, [task], urgent=False)

        if self._journal is None:
            self._journal = DocumentJournal(os.path.join(self._folder.path, _DOCUMENTS), submit)
        return self._journal

    def shutdown(self) -> None:
        """Stores what was to be stored, and ends the use of the store.

        A thread that hangs keeps the store's files open. It uses no rows of the region any more.
        """
        if self._closed:
            return
        self._closed = True
        self._note()
        ended = self._jobs.stop()
        self._rows = self._rows[:0].copy()  # the region can be unmapped
        if ended:
            if self._journal is not None:
                self._journal.close()
            self._folder.close()


def open_file_tier(
    options: TierOptions, primary_kv_view: memoryview, fingerprint: bytes, describe: Describe
) -> FileTier:
    """The file tier that the options describe; they have a `path`.

    Args:
        options: of the tier.
        primary_kv_view: the host region, `[rows, row_bytes]`.
        fingerprint: of the model.
        describe: see `FileTier`.

    Raises:
        RefusedError: the files cannot be kept; says why and what to do.
    """
    assert options.path is not None
    assert primary_kv_view.strides is not None
    try:
        sealer = _sealer(options.key_file)
        known = (fingerprint, primary_kv_view.strides[0], sealer)
        store = RecordFolder(options.path, *known, codec=options.codec)
        tier = FileTier(
            *(primary_kv_view, store, options.disk_bytes, describe), io_threads=options.io_threads
        )
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"the second tier's files cannot be kept in {options.path}: {error}; correct this, or "
            "start without tier.path"
        ) from error
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"the second tier's files need the package {error.name}: install vllm-segreuse[tier]"
        ) from error
    logger.info(
        "segment reuse: %d records in %s, %s",
        *(tier.num_records, store.path, "encrypted" if sealer.algorithm else "not encrypted"),
    )
    return tier


def _sealer(key_file: str | None) -> Sealer:
    if key_file is None and KEY_ENV not in os.environ:
        return Checksum()
    # Here, not above: the package is needed for encryption only.
    from vllm_segreuse.tier.encryption import Aes256Gcm, master_key

    return Aes256Gcm(master_key(key_file, os.environ))
