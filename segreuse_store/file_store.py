# SPDX-License-Identifier: Apache-2.0
"""A store of records in files, for an owner that has their payloads in rows of host memory.

It keeps records by `folder.py` within a budget, together with other engines, and answers what there
is from memory.

The owner's thread calls every method, and the store counts there. That thread makes no system call:
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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from segreuse_store.database import Notes
from segreuse_store.erasures import Erasures
from segreuse_store.folder import LostError, RecordFolder, Written
from segreuse_store.format import StoredRecord
from segreuse_store.jobs import Job, JobResult, Jobs, Settle
from segreuse_store.journal import GroupJournal
from segreuse_store.residents import LabelsOf, Residents, no_labels
from segreuse_store.sealing import KEY_ENV, Checksum, Sealer
from segreuse_store.watching import Watcher

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("vllm.segreuse")

DEADLINE_S = 30.0
PAUSES_S = (1.0, 300.0)
"""Writes pause after an error: for so long at first, twice as long each time, so long at most."""

LOST = ("missing", "torn", "corrupt")
"""Reasons for which a record is removed: see `LostError`."""

_TASK_RECORDS = 16
_NOTE_S = 1.0
"""Uses are written down so often, for other engines."""
_STOP_S = 2.0

Describe = Callable[[bytes], StoredRecord | None]
Item = TypeVar("Item")


class StoreOptions(NamedTuple):
    """How records are stored.

    Attributes:
        disk_bytes: most bytes that files take on the device, of all engines.
        io_threads: threads that read and write.
        zeroises: whether copies of rows are zeroed once they are not needed.
    """

    disk_bytes: int
    io_threads: int = 4
    zeroises: bool = False


class StoreEvent(NamedTuple):
    """Records have come to files, or have left them.

    Attributes:
        keys: of the records.
        removed: whether they have left.
    """

    keys: list[bytes]
    removed: bool


class FileStore:
    """Records in files.

    Attributes:
        counts: what became of records, by reason: `stored`, `loaded`, `removed` for others; `found`
            are those that another engine has written, `shared` those of the loaded ones; not
            stored: `full` (of records that may not be removed), `busy`, `paused`, `no_space`,
            `io_error`; not loaded: `missing`, `torn`, `corrupt`, `unreadable`; either: `stalled`.
        num_slots: most records that there may be, of all engines.
        folder: where the files lie.
        zeroises: as the options say.
    """

    def __init__(
        self,
        rows: memoryview,
        folder: RecordFolder,
        options: StoreOptions,
        describe: Describe,
        on_erased: Callable[[list[bytes]], None] = lambda keys: None,
        labels_of: LabelsOf = no_labels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over an open folder.

        Args:
            rows: host memory, `[rows, row_bytes]`.
            folder: the records; no other store may use it.
            options: budget, threads, and zeroing.
            describe: what is known of a key that is to be stored; None: it is not stored.
            on_erased: told of records that another engine has erased; in the owner's thread.
            labels_of: digests (`digest`) that `claim` finds a record by, from its `about`.
            clock: seconds.

        Raises:
            OSError: what is above the budget could not be removed.
        """
        self.folder = folder
        self.zeroises = options.zeroises
        self.num_slots = options.disk_bytes // folder.record_bytes
        self._rows = np.asarray(rows)
        self._describe = describe
        self._clock = clock
        self._on_erased = on_erased
        folder.trim(self.num_slots)
        self._residents = Residents(folder.at_start, labels_of)
        self._jobs = Jobs(options.io_threads, DEADLINE_S, clock)
        # Rows that are being stored cannot be used for anything else.
        self._most_coming = max(1, len(self._rows) // 2)
        self._coming: set[bytes] = set()
        self._erased: set[bytes] = set()
        self._erasures = Erasures(folder)
        self._wanted: set[bytes] = set()
        self._used: dict[str, float] = {}
        self._noted_s = clock()
        self._durable: dict[bytes, bool] = {}
        self._events: list[StoreEvent] = []
        self._hidden = False
        self._closed = False
        self._journal: GroupJournal | None = None
        self._paused_until_s = -float("inf")
        self._pause_s = PAUSES_S[0]
        self.counts: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._count_found(self._residents)
        self.watcher = Watcher(folder.changes, self.clean)

    # What is there.

    @property
    def used_bytes(self) -> int:
        """Bytes of the device that all engines take, by what is written and removed just now, too,
        as was known last."""
        return self.folder.slots_used * self.folder.record_bytes

    @property
    def num_records(self) -> int:
        """Records that are on disk."""
        return len(self._residents)

    @property
    def is_stalled(self) -> bool:
        """Whether the file system has not answered for `DEADLINE_S`: until it does, nothing is
        offered and nothing is stored."""
        return self._jobs.stalled

    @property
    def num_abandoned(self) -> int:
        """Jobs that were reported as failed at their deadline, and of which tasks are left."""
        return self._jobs.num_abandoned

    @property
    def num_coming(self) -> int:
        """Records that are being written."""
        return len(self._coming)

    @property
    def num_unclaimed(self) -> int:
        """Labels by which `claim` would find a record."""
        return self._residents.num_unclaimed

    def lookup(self, key: bytes) -> bool:
        """Whether a record can be loaded now, from memory."""
        usable = not (self._hidden or self._jobs.stalled)
        return usable and not self._is_absent(key)

    def records(self) -> Iterator[StoredRecord]:
        """All records, whether or not they are hidden."""
        return iter(self._residents)

    def digest(self, label: bytes) -> bytes:
        """What stands for a label on disk, and nowhere else [16 bytes]. Nobody without the store's
        key can say what it is of."""
        return self.folder.digest(label)

    def claim(self, label: bytes) -> list[StoredRecord]:
        """The records with a label that were there at the start, or when they were revealed, and
        what other engines have written since; each once.

        To be called whenever the label may matter.

        Args:
            label: one that `digest` makes a digest of.
        """
        self._follow()
        return [] if self._hidden else self._residents.claim(self.digest(label))

    def _follow(self) -> None:
        """What other engines have done."""
        for changes in self.watcher.found():
            gone = changes.gone
            if changes.all is not None:
                others = [record.name for record in self._residents if not record.mine]
                gone = [name for name in others if name not in changes.all]
            removed = self._gone(gone)
            if erased := [record.key for record in removed if record.name in changes.erased]:
                self._on_erased(erased)
            new = [record for record in changes.coming if self._residents.add(record)]
            self._count_found(new)
            if not self._hidden:
                self._event([record.key for record in new], removed=False)
            for record in new:
                self._residents.offer(record)

    def _count_found(self, records: Iterable[StoredRecord]) -> None:
        if others := sum(not record.mine for record in records):
            self.counts["found"] += others

    def _gone(self, names: Iterable[str]) -> list[StoredRecord]:
        """Records that are on disk no longer; returns those that were known."""
        removed = [found for name in names if (found := self._residents.remove(name)) is not None]
        if removed:
            self.counts["removed"] += len(removed)
        self._event([record.key for record in removed], removed=True)
        return removed

    def hide(self) -> None:
        """Offers and stores nothing: the model may have other weights from here on."""
        self._hidden = True
        self._wanted.clear()

    def reveal(self) -> None:
        """The model has the weights whose fingerprint the store has."""
        self._hidden = False
        self._residents.unclaim()

    def touch(self, keys: Iterable[bytes]) -> None:
        """The records were used."""
        for key in keys:
            self._touch(key)

    def _touch(self, key: bytes) -> StoredRecord | None:
        record = self._residents.get(key)
        if record is not None:
            self._used[record.name] = time.time()
        return record

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

    def take_events(self) -> list[StoreEvent]:
        """What has come to be on disk, and what is no longer."""
        events, self._events = self._events, []
        return events

    def _event(self, keys: list[bytes], removed: bool) -> None:
        if keys:
            self._events.append(StoreEvent(keys, removed))

    # Stores.

    def submit_store(self, job_id: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        """Stores what is new, may be stored, and has room: a job, reported by `get_finished_jobs`.

        Args:
            job_id: by which it is reported.
            keys: of the records.
            rows: of host memory that hold the payloads, and do until the job is reported.
        """
        pairs = zip(keys, rows, strict=True)
        coming = [found for key, row in pairs if (found := self._admitted(key, row)) is not None]
        self.remember()  # what was used makes room last
        tasks = [partial(self._store, batch) for batch in self._split(coming)]
        self._jobs.begin(job_id, tasks, urgent=False)

    def _split(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Every thread gets a part; large jobs are more parts than threads."""
        share = -(-len(items) // self._jobs.num_threads)
        size = max(1, min(_TASK_RECORDS, share))
        return (items[i : i + size] for i in range(0, len(items), size))

    def _admitted(self, key: bytes, row: int) -> tuple[StoredRecord, int] | None:
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
        return record, row

    def _refusal(self, durable: bool) -> str | None:
        """Why a record is not stored now. Durable ones may hold every row meanwhile: what is not
        written is lost when its row is replaced."""
        if self._jobs.stalled:
            return "stalled"
        if self._clock() < self._paused_until_s:
            return "paused"
        return "busy" if len(self._coming) >= self._most_coming and not durable else None

    def _store(self, batch: Sequence[tuple[StoredRecord, int]], job: Job) -> Settle:
        payloads: list[bytearray] = []

        def copy() -> None:
            payloads.extend(bytearray(self._rows[row]) for _, row in batch)

        try:
            if not job.use_rows(copy):
                return partial(self._not_stored, batch, None, job)
            new = [self.folder.new(record) for record, _ in batch]
            written = self.folder.write(list(zip(new, payloads, strict=True)), self.num_slots)
        except Exception as error:
            with contextlib.suppress(OSError):
                self.watcher.look()  # what was to make room may be gone
            return partial(self._not_stored, batch, error, job)
        finally:
            self._done_with(*payloads)
        return partial(self._stored, batch, written)

    def _done_with(self, *payloads: Buffer) -> None:
        """Copies of rows are not needed any more."""
        for payload in payloads if self.zeroises else ():
            np.asarray(memoryview(payload))[:] = 0

    def _stored(self, batch: Sequence[tuple[StoredRecord, int]], written: Written) -> None:
        self._gone(written.removed)
        for record in (*written.stored, *written.there):
            self._residents.add(record)
            self._wanted.discard(record.key)
        self._pause_s = PAUSES_S[0]
        self.counts["stored"] += len(written.stored)
        self._count_found(written.there)
        if written.full:
            self.counts["full"] += written.full
        self._event([record.key for record in (*written.stored, *written.there)], removed=False)
        self._no_longer_coming(batch)

    def _not_stored(
        self, batch: Sequence[tuple[StoredRecord, int]], error: Exception | None, job: Job
    ) -> None:
        """
        Args:
            batch: what was to be stored.
            error: None: the job was abandoned before.
            job: of the batch.
        """
        job.failed = True
        self._wanted |= {record.key for record, _ in batch if record.durable}
        self._no_longer_coming(batch)
        if error is None:
            self.counts["stalled"] += len(batch)
            return
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.counts["no_space" if full else "io_error"] += len(batch)
        self._paused_until_s = self._clock() + self._pause_s
        logger.warning(
            "segment reuse: %d records could not be written to %s (%s): no more are for %g s",
            len(batch),
            self.folder.path,
            error,
            self._pause_s,
        )
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])

    def _no_longer_coming(self, batch: Sequence[tuple[StoredRecord, int]]) -> None:
        keys = {record.key for record, _ in batch}
        self._coming -= keys
        if erased := keys & self._erased:
            self._erased -= erased
            self.erase(erased)

    # Loads.

    def submit_load(self, job_id: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        """Fills rows with records, each verified before: a job, reported by `get_finished_jobs`.

        Args:
            job_id: by which it is reported.
            keys: of the records.
            rows: of host memory, which nobody reads or writes until the job is reported.
        """
        pairs = list(zip(keys, rows, strict=True))
        found = [
            (record, row)
            for key, row in pairs
            if self.lookup(key) and (record := self._touch(key)) is not None
        ]
        tasks = [partial(self._load, batch) for batch in self._split(found)]
        job = self._jobs.begin(job_id, tasks, urgent=True)
        if lost := len(pairs) - len(found):
            job.failed = True
            self.counts["stalled" if self._jobs.stalled else "missing"] += lost

    def _load(self, batch: Sequence[tuple[StoredRecord, int]], job: Job) -> Settle:
        outcomes = [(record, self._loaded(record, row, job)) for record, row in batch]
        lost = [record.name for record, reason in outcomes if reason in LOST]
        unreadable = [record.name for record, reason in outcomes if reason == "unreadable"]
        try:
            self.folder.remove(lost)
            # What cannot be read is still there: it is the first to make room.
            self.folder.set_aside(unreadable)
        except Exception as error:
            logger.warning("segment reuse: %s", error)
        return partial(self._settle_load, outcomes, job)

    def _loaded(self, record: StoredRecord, row: int, job: Job) -> str | None:
        """Why the row was not filled, or None."""

        def copy() -> None:
            self._rows[row] = np.frombuffer(memoryview(payload), dtype=self._rows.dtype)

        payload: Buffer = bytearray()
        try:
            payload = self.folder.read(record)
            return None if job.use_rows(copy) else "stalled"
        except LostError as error:
            return error.reason
        except Exception as error:
            logger.warning(
                "segment reuse: a record could not be read from %s: %s", self.folder.path, error
            )
            return "unreadable"
        finally:
            self._done_with(payload)

    def _settle_load(self, outcomes: Sequence[tuple[StoredRecord, str | None]], job: Job) -> None:
        for record, reason in outcomes:
            self.counts[reason or "loaded"] += 1
            if reason is None:
                if not record.mine:
                    self.counts["shared"] += 1
                job.loaded.append(record.key)
                continue
            job.failed = True
            if reason != "stalled":
                self._gone([record.name])

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
        """The owner holds these again: what could not be erased is offered again, and what was to
        be erased once it is written is not."""
        self._erased.difference_update(keys)
        left = self._erasures.wanted_again(keys)
        there = [key for key in left if self._residents.get(key) is not None]
        self._wanted.difference_update(there)
        self._event(there, removed=False)

    def _follow_erasures(self) -> None:
        for keys, names in self._erasures.finished():
            self._gone(names)
            # This engine holds them, whatever it has written of that before it released them.
            self._durable |= dict.fromkeys(self._wanted.intersection(keys), True)
        self._wanted_again(self._wanted)

    def get_finished_jobs(self) -> list[JobResult]:
        """What is over since the last call."""
        results = self._jobs.results()
        self._follow_erasures()
        self._follow()
        if self._durable or (self._used and self._clock() - self._noted_s >= _NOTE_S):
            self.note()
        return results

    def note(self) -> None:
        """Has what was used, and what this engine holds, written down soon, for other engines."""

        def note(job: Job) -> Settle:
            try:
                self.folder.note()
            except Exception as error:
                return partial(logger.warning, "segment reuse: %s", error)
            return lambda: None

        self.remember()
        self._jobs.begin(None, [note], urgent=False)

    def remember(self) -> None:
        """What was used, and what this engine holds, is written down with the next write."""
        if self._used or self._durable:
            self._noted_s = self._clock()
            self.folder.remember(Notes(self._used, self._durable))
            self._used, self._durable = {}, {}

    def clean(self) -> None:
        """Ends what this engine could not end before, and what dead ones have left. For a thread
        that may wait.

        Raises:
            OSError: some of it is left.
        """
        self._erasures.again()
        self.folder.clean()

    def take_counts(self) -> Counter[str]:
        """What has been counted since the last call."""
        new = self.counts - self._counted
        self._counted = self.counts.copy()
        return new

    def has_pending_work(self) -> bool:
        """Whether a job is not reported yet."""
        return self._jobs.pending

    def drain_jobs(self) -> None:
        """Waits until all jobs are over, or abandoned at their deadline."""
        self._jobs.drain()

    def journal(self) -> GroupJournal:
        """Which records the owner's groups consist of, in a file beside the records.

        Raises:
            OSError: the file can be neither read nor made.
        """
        if self._journal is None:
            self._journal = GroupJournal(self.folder.journal, self._begin)
        return self._journal

    def shutdown(self) -> None:
        """Stores what was to be stored, and ends the use of the store.

        A thread that hangs keeps the store's files open. It uses no rows any more.
        """
        if self._closed:
            return
        self._closed = True
        self.note()
        self._begin(self._erasures.again)
        ended = self._jobs.stop() and self.watcher.stop(_STOP_S)
        self._rows = self._rows[:0].copy()  # host memory can be unmapped
        if ended:
            if self._journal is not None:
                self._journal.close()
            self.folder.close()


def sealer_of(key_file: str | None) -> Sealer:
    """What seals records: a cipher if there is a key, else a checksum.

    Args:
        key_file: with the key [32 bytes as hex or base64]; None: the environment's
            `SEGREUSE_TIER_KEY`, if it is set.

    Raises:
        ValueError: there is no such key there.
        ModuleNotFoundError: `cryptography` is not installed.
    """
    if key_file is None and KEY_ENV not in os.environ:
        return Checksum()
    # Here, not above: the package is needed for encryption only.
    from segreuse_store.encryption import Aes256Gcm, master_key

    return Aes256Gcm(master_key(key_file, os.environ))
