# SPDX-License-Identifier: Apache-2.0
"""The file tier: a secondary tier of vLLM's `TieringOffloadingManager` (vllm/v1/kv_offload).

vLLM's own file tier (`tiering/fs`) has no budget, no checksums and no syncs. This one keeps records
by `folder.py` within a budget, together with other engines, and answers what there is from memory.

The scheduler's thread calls every method, and owns what is counted here. It makes no system call:
the I/O threads of `jobs.py` do, get all that they need with a task, and return how to settle it;
`watching.py` brings what other engines do. While a task hangs, nothing is offered and nothing is
stored.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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

from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.tier.catalogue import StoredRecord
from vllm_segreuse.tier.database import Notes
from vllm_segreuse.tier.erasures import Erasures
from vllm_segreuse.tier.folder import LostError, RecordFolder, Written
from vllm_segreuse.tier.format import DiskRecord, record_bytes, record_of
from vllm_segreuse.tier.jobs import Job, Jobs, Settle
from vllm_segreuse.tier.journal import DocumentJournal
from vllm_segreuse.tier.residents import Residents
from vllm_segreuse.tier.sealing import KEY_ENV, Checksum, Sealer
from vllm_segreuse.tier.seats import Owner
from vllm_segreuse.tier.watching import Watcher

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("vllm.segreuse")

DEADLINE_S = 30.0
PAUSES_S = (1.0, 300.0)
"""Writes pause after an error: for so long at first, twice as long each time, so long at most."""

MIN_RECORDS = 16

LOST = ("missing", "torn", "corrupt")
"""Reasons for which a record is removed: see `LostError`."""

_TASK_RECORDS = 16
_NOTE_S = 1.0
"""Uses are written down so often, for other engines."""
_STOP_S = 2.0

Describe = Callable[[bytes], StoredRecord | None]
Item = TypeVar("Item")


class _Coming(NamedTuple):
    record: StoredRecord
    row: int


class FileTier(SecondaryTierManager):
    """Records in files.

    Attributes:
        counts: what became of records, by reason: `stored`, `loaded`, `removed` for others; `found`
            are those that another engine has written, `shared` those of the loaded ones; not
            stored: `full` (of records that may not be removed), `busy`, `paused`, `no_space`,
            `io_error`; not loaded: `missing`, `torn`, `corrupt`, `unreadable`; either: `stalled`.
        num_slots: most records that there may be, of all engines.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        primary_kv_view: memoryview,
        folder: RecordFolder,
        options: TierOptions,
        describe: Describe,
        on_erased: Callable[[list[bytes]], None] = lambda keys: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over an open store.

        Args:
            primary_kv_view: the host region, `[rows, row_bytes]`.
            folder: the store.
            options: most bytes that files take on the device, threads that read and write, and
                whether copies of rows are zeroed.
            describe: what is known of a key that is to be stored; None: it is not stored.
            on_erased: told of records that another engine has erased; in the scheduler's thread.
            clock: seconds.

        Raises:
            OSError: what is above the budget could not be removed.
        """
        super().__init__(None, primary_kv_view, "segreuse_files")
        self._rows = np.asarray(primary_kv_view)
        self._folder = folder
        self._describe = describe
        self._clock = clock
        self._zeroises = options.zeroise
        self._on_erased = on_erased
        self.num_slots = options.disk_bytes // folder.record_bytes
        folder.trim(self.num_slots)
        self._residents = Residents(folder.at_start)
        self._jobs = Jobs(options.io_threads, DEADLINE_S, clock)
        # Rows that are being stored cannot be used for anything else.
        self._most_coming = max(1, len(self._rows) // 2)
        self._coming: set[bytes] = set()
        self._erased: set[bytes] = set()
        self._erasures = Erasures(folder.release)
        self._wanted: set[bytes] = set()
        self._used: dict[str, float] = {}
        self._noted_s = clock()
        self._durable: dict[bytes, bool] = {}
        self._events: list[OffloadingEvent] = []
        self._hidden = False
        self._closed = False
        self._journal: DocumentJournal | None = None
        self._paused_until_s = -float("inf")
        self._pause_s = PAUSES_S[0]
        self._unnamed = self._by_namespace()
        self.counts: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._count_found(self._residents)
        self.watcher = Watcher(folder.changes, self.clean)

    # What is there.

    @property
    def used_bytes(self) -> int:
        """Bytes of the device that all engines take, by what is written and removed just now, too,
        as was known last."""
        return self._folder.slots_used * self._folder.record_bytes

    @property
    def num_records(self) -> int:
        """Records that are on disk."""
        return len(self._residents)

    def has(self, key: bytes) -> bool:
        """Whether a record can be loaded."""
        usable = not (self._hidden or self._jobs.stalled)
        return usable and not self._is_absent(key)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS, from memory."""
        return LookupResult.HIT if self.has(key) else LookupResult.MISS

    def records(self) -> Iterator[StoredRecord]:
        """All records.

        Digests stand in for their namespaces, whose keys are not on disk.
        """
        return map(record_of, self._residents)

    def records_in(self, namespace: bytes) -> list[StoredRecord]:
        """The records of a namespace that were there at the start, or when they were revealed, and
        what other engines have written since; each once.

        To be called whenever a request names the namespace.

        Args:
            namespace: its key; the only one that the records have.
        """
        self._follow()
        if self._hidden:
            return []
        keys = self._unnamed.pop(self._folder.digest(namespace), ())
        found = [kept for key in keys if (kept := self._residents.get(key)) is not None]
        return [record_of(kept)._replace(namespaces=(namespace,)) for kept in found]

    def _by_namespace(self) -> dict[bytes, dict[bytes, None]]:
        """Keys of records by digest of a namespace."""
        found: dict[bytes, dict[bytes, None]] = defaultdict(dict)
        for record in self.records():
            for digest in record.namespaces:
                found[digest][record.key] = None
        return found

    def _follow(self) -> None:
        """What other engines have done."""
        for changes in self.watcher.found():
            gone = changes.gone
            if changes.all is not None:
                others = [kept.name for kept in self._residents if not kept.mine]
                gone = [name for name in others if name not in changes.all]
            removed = self._gone(gone)
            if erased := [kept.key for kept in removed if kept.name in changes.erased]:
                self._on_erased(erased)
            new = [kept for kept in changes.coming if self._residents.add(kept)]
            self._count_found(new)
            if not self._hidden:
                self._event([kept.key for kept in new], removed=False)
            for kept in new:
                for digest in record_of(kept).namespaces:
                    self._unnamed[digest][kept.key] = None

    def _count_found(self, records: Iterable[DiskRecord]) -> None:
        if others := sum(not kept.mine for kept in records):
            self.counts["found"] += others

    def _gone(self, names: Iterable[str]) -> list[DiskRecord]:
        """Records that are on disk no longer; returns those that were known."""
        removed = [kept for name in names if (kept := self._residents.remove(name)) is not None]
        if removed:
            self.counts["removed"] += len(removed)
        for kept in removed:
            for digest in record_of(kept).namespaces:
                if (keys := self._unnamed.get(digest)) is not None:
                    keys.pop(kept.key, None)
                    if not keys:
                        del self._unnamed[digest]
        self._event([kept.key for kept in removed], removed=True)
        return removed

    def hide(self) -> None:
        """Offers and stores nothing: the model may have other weights from here on."""
        self._hidden = True
        self._wanted.clear()

    def reveal(self) -> None:
        """The model has the weights whose fingerprint the store has."""
        self._hidden = False
        self._unnamed = self._by_namespace()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The records were used."""
        for key in keys:
            self._touch(key)

    def _touch(self, key: bytes) -> DiskRecord | None:
        kept = self._residents.get(key)
        if kept is not None:
            self._used[kept.name] = time.time()
        return kept

    def set_durable(self, keys: Iterable[bytes], durable: bool) -> None:
        """Durable records are not removed for others that are not, nor by engines that do not hold
        them while one that does runs."""
        noted = dict.fromkeys(keys, durable)
        if durable:
            self._wanted_again(noted)
            self._wanted |= {key for key in noted if self._is_absent(key)}
        self._durable |= noted

    def _is_absent(self, key: bytes) -> bool:
        """Whether no file has a record, or none will have it soon."""
        return key in self._erasures or self._residents.get(key) is None

    def take_wanted(self) -> list[bytes]:
        """Durable records that no file has and that may be stored now: those in host memory are to
        be submitted. What is refused then, or fails, is wanted again."""
        taken = self._wanted_now()
        self._wanted -= taken
        return list(taken)

    def _wanted_now(self) -> set[bytes]:
        if self._hidden or self._refusal(durable=True) is not None:
            return set()
        return {key for key in self._wanted - self._coming if key not in self._erasures}

    @property
    def needs_step(self) -> bool:
        """Whether something begins with the next step only: the erasure of what is being written,
        or the store of what is wanted."""
        if self._jobs.stalled:
            return False
        waits = any(key in self._erasures for key in self._wanted)
        return bool(self._erased or waits or self._wanted_now())

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
        self._remember()  # what was used makes room last
        tasks = [partial(self._store, batch) for batch in self._split(coming)]
        self._jobs.begin(job_metadata.job_id, tasks, urgent=False)

    def _split(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Every thread gets a part; large jobs are more parts than threads."""
        share = -(-len(items) // self._jobs.num_threads)
        size = max(1, min(_TASK_RECORDS, share))
        return (items[i : i + size] for i in range(0, len(items), size))

    def _admitted(self, key: OffloadKey, row: int) -> _Coming | None:
        if self._hidden:
            return None
        self._wanted_again([key])
        if key in self._coming:
            return None
        if not self._is_absent(key):
            self._touch(key)
            return None
        record = self._describe(key)
        if record is None:
            return None
        if key in self._erasures:
            # What is written now could be erased, too.
            if record.durable:
                self._wanted.add(key)
            return None
        if refusal := self._refusal(record.durable):
            self.counts[refusal] += 1
            if record.durable:
                self._wanted.add(key)
            return None
        self._coming.add(key)
        return _Coming(record, row)

    def _refusal(self, durable: bool) -> str | None:
        """Why a record is not stored now. Durable ones may hold every row meanwhile: what is not
        written is lost when its row is replaced."""
        if self._jobs.stalled:
            return "stalled"
        if self._clock() < self._paused_until_s:
            return "paused"
        return "busy" if len(self._coming) >= self._most_coming and not durable else None

    def _store(self, batch: Sequence[_Coming], job: Job) -> Settle:
        payloads: list[bytearray] = []

        def copy() -> None:
            payloads.extend(bytearray(self._rows[coming.row]) for coming in batch)

        try:
            if not job.use_rows(copy):
                return partial(self._not_stored, batch, None, job)
            new = [self._folder.new(coming.record) for coming in batch]
            written = self._folder.write(list(zip(new, payloads, strict=True)), self.num_slots)
        except Exception as error:
            with contextlib.suppress(OSError):
                self.watcher.look()  # what was to make room may be gone
            return partial(self._not_stored, batch, error, job)
        finally:
            self._done_with(*payloads)
        return partial(self._stored, batch, written)

    def _done_with(self, *payloads: Buffer) -> None:
        """Copies of rows are not needed any more."""
        for payload in payloads if self._zeroises else ():
            np.asarray(memoryview(payload))[:] = 0

    def _stored(self, batch: Sequence[_Coming], written: Written) -> None:
        self._gone(written.removed)
        for kept in (*written.stored, *written.there):
            self._residents.add(kept)
            self._wanted.discard(kept.key)
        self._pause_s = PAUSES_S[0]
        self.counts["stored"] += len(written.stored)
        self._count_found(written.there)
        if written.full:
            self.counts["full"] += written.full
        self._event([kept.key for kept in (*written.stored, *written.there)], removed=False)
        self._no_longer_coming(batch)

    def _not_stored(self, batch: Sequence[_Coming], error: Exception | None, job: Job) -> None:
        """
        Args:
            batch: what was to be stored.
            error: None: the job was abandoned before.
            job: of the batch.
        """
        job.failed = True
        self._wanted |= {coming.record.key for coming in batch if coming.record.durable}
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
            if self.has(key) and (kept := self._touch(key)) is not None
        ]
        tasks = [partial(self._load, batch) for batch in self._split(found)]
        job = self._jobs.begin(job_metadata.job_id, tasks, urgent=True)
        if lost := len(pairs) - len(found):
            job.failed = True
            self.counts["stalled" if self._jobs.stalled else "missing"] += lost

    def _load(self, batch: Sequence[tuple[DiskRecord, int]], job: Job) -> Settle:
        outcomes = [(kept, self._loaded(kept, row, job)) for kept, row in batch]
        lost = [kept.name for kept, reason in outcomes if reason in LOST]
        unreadable = [kept.name for kept, reason in outcomes if reason == "unreadable"]
        try:
            self._folder.remove(lost)
            # What cannot be read is still there: it is the first to make room.
            self._folder.set_aside(unreadable)
        except Exception as error:
            logger.warning("segment reuse: %s", error)
        return partial(self._settle_load, outcomes, job)

    def _loaded(self, kept: DiskRecord, row: int, job: Job) -> str | None:
        """Why the row was not filled, or None."""

        def copy() -> None:
            self._rows[row] = np.frombuffer(memoryview(payload), dtype=self._rows.dtype)

        payload: Buffer = bytearray()
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
        finally:
            self._done_with(payload)

    def _settle_load(self, outcomes: Sequence[tuple[DiskRecord, str | None]], job: Job) -> None:
        for kept, reason in outcomes:
            self.counts[reason or "loaded"] += 1
            if reason is None:
                if not kept.mine:
                    self.counts["shared"] += 1
                job.loaded.append(OffloadKey(kept.key))
                continue
            job.failed = True
            if reason != "stalled":
                self._gone([kept.name])

    # Both.

    def erase(self, keys: Iterable[bytes]) -> None:
        """This engine holds records no longer. What no other engine holds is removed, and with its
        row what could open its file, for good."""
        leaving = []
        for key in keys:
            self._durable.pop(key, None)
            self._wanted.discard(key)
            if key in self._coming:
                self._erased.add(key)
            else:
                leaving.append(key)
        if leaving:
            self._erasures.begin(leaving)
            self._begin(partial(self._erasures.erase, leaving))

    def _begin(self, work: Callable[[], None]) -> None:
        """Have an I/O thread do something that nobody waits for."""

        def task(job: Job) -> Settle:
            work()
            return lambda: None

        self._jobs.begin(None, [task], urgent=False)

    def _wanted_again(self, keys: Collection[bytes]) -> None:
        """Documents were added that consist of these: what could not be erased is offered again,
        and what was to be erased once it is written is not."""
        self._erased.difference_update(keys)
        kept = self._erasures.wanted_again(keys)
        there = [key for key in kept if self._residents.get(key) is not None]
        self._wanted.difference_update(there)
        self._event(there, removed=False)

    def _follow_erasures(self) -> None:
        for keys, names in self._erasures.finished():
            self._gone(names)
            # This engine holds them, whatever it has written of that before it released them.
            self._durable |= dict.fromkeys(self._wanted.intersection(keys), True)
        self._wanted_again(self._wanted)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What is over since the last call."""
        results = self._jobs.results()
        self._follow_erasures()
        self._follow()
        if self._durable or (self._used and self._clock() - self._noted_s >= _NOTE_S):
            self._note()
        return results

    def _note(self) -> None:
        def note(job: Job) -> Settle:
            try:
                self._folder.note()
            except Exception as error:
                return partial(logger.warning, "segment reuse: %s", error)
            return lambda: None

        self._remember()
        self._jobs.begin(None, [note], urgent=False)

    def _remember(self) -> None:
        if self._used or self._durable:
            self._noted_s = self._clock()
            self._folder.remember(Notes(self._used, self._durable))
            self._used, self._durable = {}, {}

    def clean(self) -> None:
        """Ends what this engine could not end before, and what dead ones have left. For a thread
        that may wait.

        Raises:
            OSError: some of it is left.
        """
        self._erasures.again()
        self._folder.clean()

    def take_counts(self) -> Counter[str]:
        """What has been counted since the last call."""
        new = self.counts - self._counted
        self._counted = self.counts.copy()
        return new

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

        if self._journal is None:
            self._journal = DocumentJournal(self._folder.journal, self._begin)
        return self._journal

    def shutdown(self) -> None:
        """Stores what was to be stored, and ends the use of the store.

        A thread that hangs keeps the store's files open. It uses no rows of the region any more.
        """
        if self._closed:
            return
        self._closed = True
        self._note()
        self._begin(self._erasures.again)
        ended = self._jobs.stop() and self.watcher.stop(_STOP_S)
        self._rows = self._rows[:0].copy()  # the region can be unmapped
        if ended:
            if self._journal is not None:
                self._journal.close()
            self._folder.close()


def open_file_tier(
    options: TierOptions,
    primary_kv_view: memoryview,
    fingerprint: bytes,
    describe: Describe,
    owner: Owner | None = None,
    on_erased: Callable[[list[bytes]], None] = lambda keys: None,
) -> FileTier:
    """The file tier that the options describe; they have a `path`.

    Args:
        options: of the tier.
        primary_kv_view: the host region, `[rows, row_bytes]`.
        fingerprint: of the model.
        describe: see `FileTier`.
        owner: the engine, as it is known after a restart.
        on_erased: see `FileTier`.

    Raises:
        RefusedError: the files cannot be kept; says why and what to do.
    """
    assert options.path is not None
    assert primary_kv_view.strides is not None
    size = record_bytes(primary_kv_view.strides[0])
    if options.disk_bytes < MIN_RECORDS * size:
        raise RefusedError(
            f"tier.disk_gib is {options.disk_gib:g}, which holds {options.disk_bytes // size} "
            f"records of {size / (1 << 20):.1f} MiB; give it room for {MIN_RECORDS} at least"
        )
    try:
        sealer = _sealer(options.key_file)
        known = (fingerprint, primary_kv_view.strides[0], sealer)
        store = RecordFolder(options.path, *known, codec=options.codec, owner=owner)
        tier = FileTier(primary_kv_view, store, options, describe, on_erased)
        tier.journal()  # opened here: it may be what is wrong
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
