# SPDX-License-Identifier: Apache-2.0
"""What the owner of a store sees: budget, order of removal, faults, a file system that hangs."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segreuse_store import watching
from segreuse_store.database import Database
from segreuse_store.file_store import DEADLINE_S, PAUSES_S, FileStore, StoreOptions
from segreuse_store.format import StoredRecord
from segreuse_store.jobs import JobResult
from segreuse_store.leases import Owner
from segreuse_store.sealing import Sealer
from tests.store import records
from tests.store.records import FaultyDisk, Hang, folder, key_of, payload_of, raises, record

ROWS = 64
RECORD_BYTES = 12288


class Engine:
    """An owner of a store, with a clock of its own; all its records have the label `alice`."""

    def __init__(
        self,
        path: Path,
        slots: int = 100,
        owner: Owner | None = None,
        sealer: Sealer | None = None,
        zeroises: bool = False,
    ) -> None:
        self.disk = FaultyDisk()
        self.region = np.zeros((ROWS, records.PAYLOAD_BYTES), dtype=np.int8)
        self.described: dict[bytes, StoredRecord] = {}
        self.now = 0.0
        store = folder(path, sealer, self.disk, owner=owner)
        assert store.record_bytes == RECORD_BYTES
        self.tier = FileStore(
            memoryview(self.region),
            store,
            StoreOptions(slots * RECORD_BYTES, io_threads=2, zeroises=zeroises),
            self.described.get,
            labels_of=records.labels_of,
            clock=lambda: self.now,
        )
        self.results: dict[int, JobResult] = {}
        self.jobs = 0

    def begin_store(self, *numbers: int, durable: bool = False) -> int:
        for number in numbers:
            labels = [self.tier.digest(b"alice")]
            self.described[key_of(number)] = record(number, durable, labels)
            self.region[number % ROWS] = np.frombuffer(payload_of(number), dtype=np.int8)
        return self.begin(self.tier.submit_store, numbers, [number % ROWS for number in numbers])

    def begin_load(self, *numbers: int, rows: list[int] | None = None) -> int:
        return self.begin(self.tier.submit_load, numbers, rows or list(range(len(numbers))))

    def begin(
        self,
        submit: Callable[[int, Iterable[bytes], Iterable[int]], None],
        numbers: tuple[int, ...],
        rows: list[int],
    ) -> int:
        self.jobs += 1
        submit(self.jobs, [key_of(number) for number in numbers], rows)
        return self.jobs

    def poll(self) -> None:
        self.results |= {result.job_id: result for result in self.tier.get_finished_jobs()}

    def finish(self, job: int) -> JobResult:
        self.tier.drain_jobs()
        self.poll()
        return self.results.pop(job)

    def store(self, *numbers: int, durable: bool = False) -> JobResult:
        return self.finish(self.begin_store(*numbers, durable=durable))

    def load(self, *numbers: int) -> list[int]:
        """Numbers of the records that were loaded, all of whose rows are right."""
        self.region[:] = 0
        result = self.finish(self.begin_load(*numbers))
        loaded = set(result.successful_keys)
        assert result.success == (len(loaded) == len(numbers))
        for row, number in enumerate(numbers):
            held = self.region[row].tobytes()
            assert held == (payload_of(number) if key_of(number) in loaded else bytes(len(held)))
        return [number for number in numbers if key_of(number) in loaded]

    def there(self, *numbers: int) -> list[int]:
        return [n for n in numbers if self.tier.lookup(key_of(n))]

    def events(self) -> list[tuple[int, bool]]:
        number = {key_of(n): n for n in range(200)}
        return [
            (number[key], event.removed) for event in self.tier.take_events() for key in event.keys
        ]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.disk.faults.clear()
    engine.tier.shutdown()


def test_what_was_stored_is_loaded(engine: Engine) -> None:
    assert engine.there(1, 2) == []
    assert engine.store(1, 2).success
    assert engine.there(1, 2, 3) == [1, 2]
    assert engine.load(2, 1) == [2, 1]
    assert engine.load(1, 3) == [1]
    assert sorted(engine.events()) == [(1, False), (2, False)]  # two threads have stored them
    assert engine.tier.counts == {"stored": 2, "loaded": 3, "missing": 1}


def test_many_records_are_split_over_threads(engine: Engine) -> None:
    numbers = list(range(16))
    assert engine.store(*numbers).success
    assert engine.load(*numbers) == numbers


def test_what_is_there_is_not_stored_again(engine: Engine, tmp_path: Path) -> None:
    engine.store(1)
    first, again = engine.begin_store(2), engine.begin_store(1, 2)
    assert engine.finish(first).success
    assert engine.finish(again).success
    assert len(records.files(tmp_path)) == 2


def test_what_is_not_described_is_not_stored(engine: Engine, tmp_path: Path) -> None:
    job = engine.begin_store(1)
    del engine.described[key_of(1)]
    engine.finish(job)
    engine.described.clear()
    result = engine.finish(engine.begin(engine.tier.submit_store, (2,), [2]))
    assert result.success
    assert engine.there(1, 2) == [1]


def test_the_least_recently_used_is_removed_first(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=3)
    for number in (1, 2, 3):
        engine.store(number)
    engine.tier.touch([key_of(1)])
    engine.events()
    engine.store(4)
    assert engine.there(1, 2, 3, 4) == [1, 3, 4]
    assert engine.events() == [(2, True), (4, False)]
    assert len(records.files(tmp_path)) == 3
    assert engine.tier.used_bytes == 3 * RECORD_BYTES


def test_durable_records_are_removed_for_durable_ones_only(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=2)
    engine.store(1, durable=True)
    engine.store(2, durable=True)
    engine.store(3)
    assert engine.there(1, 2, 3) == [1, 2]
    assert engine.tier.counts["full"] == 1
    engine.store(4, durable=True)
    assert engine.there(1, 2, 4) == [2, 4]
    engine.tier.set_durable([key_of(4)], False)
    engine.store(5)
    assert engine.there(2, 4, 5) == [2, 5]


def test_the_budget_holds_while_records_are_written(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=4)
    seen: list[int] = []
    engine.disk.faults["create"] = lambda: seen.append(len(records.files(tmp_path)))
    for begin in range(0, 40, 4):
        engine.store(*range(begin, begin + 4))
    assert max(seen) <= 3  # and the one that is created makes 4 at most, per thread
    assert len(records.files(tmp_path)) == 4


def test_a_smaller_budget_removes_the_oldest_at_the_start(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for number in (1, 2):
        engine.store(number)
    engine.store(3, durable=True)
    engine.tier.touch([key_of(1)])
    engine.tier.shutdown()
    engine = Engine(tmp_path, slots=2)
    assert engine.there(1, 2, 3) == [1, 3]
    assert len(records.files(tmp_path)) == 2


def test_a_label_gets_its_records_once(engine: Engine, tmp_path: Path) -> None:
    engine.store(1)
    engine.store(2)
    assert engine.tier.claim(b"alice") == []  # they are known already
    engine.tier.shutdown()
    engine = Engine(tmp_path)
    assert [found.key for found in engine.tier.records()] == [key_of(1), key_of(2)]
    assert engine.tier.claim(b"bob") == []
    found = engine.tier.claim(b"alice")
    assert [record.key for record in found] == [key_of(1), key_of(2)]
    assert engine.tier.claim(b"alice") == []
    engine.tier.shutdown()


def test_hidden_records_are_neither_offered_nor_joined(engine: Engine) -> None:
    engine.store(1)
    engine.tier.hide()
    engine.store(2)
    assert engine.there(1, 2) == []
    assert engine.load(1) == []
    assert engine.tier.claim(b"alice") == []
    engine.tier.reveal()
    assert engine.there(1, 2) == [1]
    assert [found.key for found in engine.tier.claim(b"alice")] == [key_of(1)]


def test_erased_records_are_gone(engine: Engine, tmp_path: Path) -> None:
    engine.store(1, 2)
    under_way = engine.begin_store(3)
    engine.tier.erase([key_of(1), key_of(3), key_of(99)])
    engine.finish(under_way)
    engine.tier.drain_jobs()
    assert engine.there(1, 2, 3) == [2]
    assert len(records.files(tmp_path)) == 1
    assert engine.tier.used_bytes == RECORD_BYTES


def test_too_many_stores_at_once_are_refused(engine: Engine) -> None:
    hang = Hang()
    engine.disk.faults["create"] = hang
    job = engine.begin_store(*range(ROWS // 2 + 5))
    assert engine.tier.counts["busy"] == 5
    hang.released.set()
    assert engine.finish(job).success
    assert engine.there(*range(ROWS)) == list(range(ROWS // 2))


def test_documents_are_stored_however_much_is_under_way(engine: Engine) -> None:
    hang = Hang()
    engine.disk.faults["create"] = hang
    job = engine.begin_store(*range(ROWS // 2 + 5), durable=True)
    assert engine.tier.counts["busy"] == 0
    hang.released.set()
    assert engine.finish(job).success
    assert engine.there(*range(ROWS)) == list(range(ROWS // 2 + 5))


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "no_space"), (errno.EIO, "io_error")]
)
@pytest.mark.parametrize("call", ["create", "append", "sync", "sync_folder"])
def test_failed_writes_pause_writing_and_nothing_else(
    engine: Engine, tmp_path: Path, call: str, number: int, reason: str
) -> None:
    engine.store(1)
    engine.disk.faults[call] = raises(number)
    assert not engine.store(2).success
    assert engine.tier.counts[reason] == 1
    engine.disk.faults.clear()
    assert engine.store(3).success
    assert engine.tier.counts["paused"] == 1
    assert engine.there(1, 2, 3) == [1]
    assert engine.load(1) == [1]
    assert len(records.files(tmp_path)) == 1
    assert engine.tier.used_bytes == RECORD_BYTES
    engine.now += PAUSES_S[0]
    engine.store(2)
    assert engine.there(2) == [2]


def fails_to_release(keys: Collection[bytes]) -> list[str]:
    raise OSError(errno.ENOSPC, "made by the test")


def bug() -> None:
    raise ValueError("made by the test")


@pytest.mark.parametrize("call", ["create", "append", "sync", "sync_folder"])
def test_an_error_that_no_disk_has_costs_its_records_only(engine: Engine, call: str) -> None:
    engine.store(1)
    engine.disk.faults[call] = bug
    for number in range(2, 6):  # more tasks than threads
        assert not engine.store(number).success
        engine.now += PAUSES_S[1]
    assert engine.tier.counts["io_error"] == 4
    engine.disk.faults.clear()
    assert engine.store(2).success
    assert engine.there(1, 2, 3) == [1, 2]
    assert engine.tier.used_bytes == 2 * RECORD_BYTES


def test_a_removal_that_fails_with_any_error_keeps_the_budget(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=2)
    engine.store(1)
    engine.store(2)
    engine.disk.faults["remove"] = bug
    assert not engine.store(3).success
    engine.tier.erase([key_of(2)])
    engine.tier.drain_jobs()
    assert engine.tier.used_bytes == 2 * RECORD_BYTES
    engine.disk.faults.clear()
    engine.now += PAUSES_S[0]
    assert engine.store(3, 4).success
    assert engine.load(3, 4) == [3, 4]
    assert len(records.files(tmp_path)) == 2


def test_an_error_that_no_disk_has_is_a_miss(engine: Engine) -> None:
    engine.store(1)
    engine.disk.faults["read"] = bug
    for _ in range(3):
        assert engine.load(1) == []
    engine.disk.faults.clear()
    assert engine.store(2).success
    assert engine.load(2) == [2]


def test_pauses_are_said_and_grow_up_to_five_minutes(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.disk.faults["create"] = raises(errno.EIO)
    said = []
    for pause_s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300):
        caplog.clear()
        assert not engine.store(1).success
        said.append(caplog.text.count(f"no more are for {pause_s} s"))
        engine.now += pause_s - 0.5
        engine.store(3)
        engine.now += 0.5
    assert said == [1] * 11
    assert engine.tier.counts == {"io_error": 11, "paused": 11}
    engine.disk.faults.clear()


def test_a_job_is_split_over_the_threads_into_parts_of_sixteen_at_most(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = engine.tier.folder.write

    def writing(new: Any, slots: int) -> Any:
        sizes.append(len(new))
        return write(new, slots)

    monkeypatch.setattr(engine.tier.folder, "write", writing)
    found = []
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 7), (13, 32), (45, 33), (78, 48)):
        assert engine.store(*range(first, first + count), durable=True).success
        found.append(sorted(sizes))
        sizes.clear()
    assert found == [[1], [1, 1], [1, 2], [3, 4], [16, 16], [1, 16, 16], [16, 16, 16]]


def test_of_one_row_one_record_may_be_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.store.test_file_store.ROWS", 1)
    engine, hang = Engine(tmp_path), Hang()
    engine.disk.faults["create"] = hang
    first, second = engine.begin_store(1), engine.begin_store(2)
    assert (engine.tier.num_coming, engine.tier.counts["busy"]) == (1, 1)
    hang.released.set()
    assert engine.finish(first).success
    assert engine.finish(second).success
    assert (engine.tier.num_coming, engine.there(1, 2)) == (0, [1])
    engine.tier.shutdown()


def test_uses_are_written_down_once_a_second(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(1)
    noted: list[float] = []
    monkeypatch.setattr(engine.tier.folder, "note", lambda: noted.append(engine.now))
    for now in (10.0, 10.5, 10.99, 11.0, 11.5, 12.5):
        engine.now = now
        engine.tier.touch([key_of(1)])
        engine.poll()
        engine.tier.drain_jobs()
    assert noted == [10.0, 11.0, 12.5]
    engine.now = 20.0
    engine.poll()
    engine.tier.drain_jobs()
    assert noted[3:] == [], "nothing was used"


def test_pauses_grow_and_end_with_a_success(engine: Engine) -> None:
    engine.disk.faults["create"] = raises(errno.ENOSPC)
    engine.store(1)
    engine.now += 1
    engine.store(1)
    engine.now += 1.5
    engine.store(1)
    assert engine.tier.counts == {"no_space": 2, "paused": 1}
    engine.disk.faults.clear()
    engine.now += 0.5
    engine.store(1)
    engine.disk.faults["create"] = raises(errno.ENOSPC)
    engine.store(2)
    engine.now += 1
    engine.store(2)
    assert engine.tier.counts == {"no_space": 4, "paused": 1, "stored": 1}


@pytest.mark.parametrize("how", ["stored", "held"])
def test_what_cannot_be_erased_is_offered_to_nobody_and_erased_later(
    how: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is wanted again."""
    engine.store(1, 2, 3)
    engine.events()
    release = engine.tier.folder.release
    monkeypatch.setattr(engine.tier.folder, "release", fails_to_release)
    engine.tier.erase([key_of(1), key_of(2)])
    for _ in range(2):
        engine.tier.drain_jobs()
        engine.tier.clean()
        engine.poll()
    assert engine.there(1, 2, 3) == [3]
    assert len(records.files(tmp_path)) == 3
    if how == "stored":
        engine.store(2)
    else:
        engine.tier.set_durable([key_of(2)], True)  # its row is in host memory still
    assert (2, False) in engine.events()
    monkeypatch.setattr(engine.tier.folder, "release", release)
    engine.tier.clean()
    engine.poll()
    assert engine.there(1, 2, 3) == [2, 3]
    assert len(records.files(tmp_path)) == 2


def test_what_could_not_be_erased_is_tried_once_more_at_the_end(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(1)
    release = engine.tier.folder.release
    monkeypatch.setattr(engine.tier.folder, "release", fails_to_release)
    engine.tier.erase([key_of(1)])
    engine.tier.drain_jobs()
    engine.poll()
    monkeypatch.setattr(engine.tier.folder, "release", release)
    engine.tier.shutdown()
    assert records.files(tmp_path) == []


def test_documents_that_are_turned_away_are_wanted_once_writes_go_on(engine: Engine) -> None:
    engine.disk.faults["create"] = raises(errno.ENOSPC)
    engine.store(1, durable=True)
    engine.store(2, durable=True)
    engine.store(3)
    assert engine.tier.counts == {"no_space": 1, "paused": 2}
    engine.disk.faults.clear()
    assert engine.tier.take_wanted() == []
    assert not engine.tier.needs_step
    engine.now += PAUSES_S[0]
    assert engine.tier.needs_step
    assert sorted(engine.tier.take_wanted()) == sorted([key_of(1), key_of(2)])
    assert engine.tier.take_wanted() == [], "once"
    assert not engine.tier.needs_step


def test_documents_that_are_not_there_are_wanted_until_they_are_stored_or_erased(
    engine: Engine,
) -> None:
    engine.store(1)
    hang = Hang()
    engine.disk.faults["create"] = hang
    job = engine.begin_store(2)
    engine.tier.set_durable(map(key_of, (1, 2, 3, 4)), True)
    engine.tier.erase([key_of(3)])
    assert engine.tier.take_wanted() == [key_of(4)], "2 is being written"
    hang.released.set()
    assert engine.finish(job).success
    assert engine.tier.take_wanted() == []


@pytest.mark.parametrize("end", ["reset", "hang"])
def test_nothing_is_wanted_that_could_not_be_stored(engine: Engine, end: str) -> None:
    engine.tier.set_durable([key_of(1)], True)
    if end == "reset":
        engine.tier.hide()
        assert not engine.tier.needs_step
        engine.tier.set_durable([key_of(2)], True)
        assert engine.tier.take_wanted() == []
        engine.tier.reveal()
        assert engine.tier.take_wanted() == [key_of(2)], "host memory has lost the other"
        return
    hang = Hang()
    engine.disk.faults["create"] = hang
    engine.begin_store(2)
    assert hang.reached.wait(30)
    engine.now += DEADLINE_S + 1
    engine.poll()
    assert engine.tier.take_wanted() == []
    assert not engine.tier.needs_step
    hang.released.set()


def test_an_idle_engine_tries_again_what_could_not_be_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no steps: the thread that looks after other engines does it."""
    monkeypatch.setattr(watching, "CLEAN_LOOKS", 1)
    engine = Engine(tmp_path)
    engine.store(1)
    with monkeypatch.context() as full:
        full.setattr(engine.tier.folder, "release", fails_to_release)
        engine.tier.erase([key_of(1)])
        engine.tier.drain_jobs()
        assert len(records.files(tmp_path)) == 1
    while records.files(tmp_path):
        time.sleep(0.01)
    while not engine.store(1).success or not engine.there(1):
        pass  # what is being erased is not stored
    assert engine.load(1) == [1], "it was erased once"
    engine.tier.shutdown()


def test_what_is_deleted_while_it_is_written_needs_a_step(engine: Engine, tmp_path: Path) -> None:
    hang = Hang()
    engine.disk.faults["sync"] = hang
    job = engine.begin_store(1, durable=True)
    assert hang.reached.wait(30)
    assert not engine.tier.needs_step
    engine.tier.erase([key_of(1)])
    assert engine.tier.needs_step
    hang.released.set()
    engine.finish(job)
    assert not engine.tier.needs_step
    engine.tier.drain_jobs()
    assert records.files(tmp_path) == []


def test_what_is_erased_twice_is_not_stored_in_between(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second erasure would remove it."""
    hangs, release = [Hang(), Hang()], engine.tier.folder.release
    waiting = iter(hangs)
    monkeypatch.setattr(
        engine.tier.folder, "release", lambda keys: (next(waiting)(), release(keys))[1]
    )
    for hang in hangs:
        engine.tier.erase([key_of(1)])
        assert hang.reached.wait(30)
        engine.tier.set_durable([key_of(1)], True)
    hangs[0].released.set()
    behind = engine.begin_store(2)  # by the thread that was released
    while behind not in engine.results:
        engine.poll()
    engine.begin_store(1, durable=True)
    assert engine.tier.num_coming == 0
    assert engine.tier.take_wanted() == []
    hangs[1].released.set()
    engine.tier.drain_jobs()
    engine.poll()
    assert engine.tier.take_wanted() == [key_of(1)]
    assert engine.store(1, durable=True).success
    assert engine.there(1) == [1]


@pytest.mark.parametrize("how", ["stored", "held"])
def test_what_is_wanted_again_while_it_is_written_is_not_erased(
    how: str, engine: Engine, tmp_path: Path
) -> None:
    hang = Hang()
    engine.disk.faults["sync"] = hang
    job = engine.begin_store(1, durable=True)
    assert hang.reached.wait(30)
    engine.tier.erase([key_of(1)])
    if how == "stored":
        engine.begin_store(1, durable=True)
    else:
        engine.tier.set_durable([key_of(1)], True)
    hang.released.set()
    engine.finish(job)
    engine.tier.drain_jobs()
    assert engine.there(1) == [1]
    assert len(records.files(tmp_path)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_wanted_again_while_it_is_erased_is_stored_behind(
    fails: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or offered again, if it was not erased."""
    engine.store(1, durable=True)
    hang, release = Hang(), engine.tier.folder.release

    def slow(keys: Collection[bytes]) -> list[str]:
        hang()
        if fails:
            raise OSError
        return release(keys)

    monkeypatch.setattr(engine.tier.folder, "release", slow)
    engine.tier.erase([key_of(1)])
    assert hang.reached.wait(30)
    engine.tier.set_durable([key_of(1)], True)
    assert engine.tier.take_wanted() == []
    assert engine.tier.needs_step
    hang.released.set()
    engine.tier.drain_jobs()
    engine.poll()
    assert engine.there(1) == ([1] if fails else [])
    assert engine.tier.take_wanted() == ([] if fails else [key_of(1)])
    assert not engine.tier.needs_step


def test_files_that_cannot_be_removed_are_paid_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=2)
    engine.store(1)
    engine.store(2)
    engine.disk.faults["remove"] = raises(errno.EIO)
    engine.store(3)
    assert engine.there(1, 2, 3) == [2]
    assert engine.tier.used_bytes == 2 * RECORD_BYTES
    engine.disk.faults.clear()
    engine.now += PAUSES_S[0]
    engine.store(3)
    assert engine.there(2, 3) == [2, 3]
    assert len(records.files(tmp_path)) == 2
    assert engine.tier.used_bytes == 2 * RECORD_BYTES


def test_what_was_written_by_half_and_stays_is_paid_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=2)
    engine.disk.faults |= {"sync": raises(errno.EIO), "remove": raises(errno.EIO)}
    engine.store(1)
    assert len(records.files(tmp_path)) == 1
    assert engine.tier.used_bytes == RECORD_BYTES
    engine.disk.faults.clear()
    for number in (2, 3, 4):
        engine.now += PAUSES_S[1]
        engine.store(number)
        assert len(records.files(tmp_path)) <= 2
    assert engine.there(3, 4) == [3, 4]


@pytest.mark.parametrize("damage", ["missing", "torn", "corrupt"])
def test_a_damaged_record_is_removed_and_its_row_not_filled(
    engine: Engine, tmp_path: Path, damage: str
) -> None:
    engine.store(1)
    (file,) = records.files(tmp_path)
    engine.store(2)
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-1] if damage == "torn" else content[:-1] + b"\0\0"[:1])
    if damage == "corrupt":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    engine.events()
    assert engine.load(1, 2) == [2]
    assert engine.tier.counts[damage] == 1
    assert engine.events() == [(1, True)]
    assert engine.there(1, 2) == [2]
    assert engine.tier.used_bytes == RECORD_BYTES
    assert not file.exists()


def test_an_unreadable_record_is_the_first_to_make_room(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=2)
    engine.store(1)
    engine.store(2)
    engine.disk.faults["read"] = raises(errno.EIO)
    assert engine.load(2) == []
    engine.disk.faults.clear()
    assert engine.there(1, 2) == [1]
    assert engine.tier.used_bytes == 2 * RECORD_BYTES
    engine.store(3)
    assert engine.there(1, 3) == [1, 3]
    assert len(records.files(tmp_path)) == 2


def test_no_call_waits_for_a_file_system_that_hangs(engine: Engine) -> None:
    """The test ends: each call below returns while both threads hang."""
    engine.store(1, 2)
    hang = Hang()
    engine.disk.faults["read"] = engine.disk.faults["create"] = hang
    engine.region[:] = 0
    load = engine.begin_load(1, 2, rows=[10, 11])
    store = engine.begin_store(3, 4)
    assert hang.reached.wait(30)
    engine.poll()
    assert engine.results == {}
    assert engine.tier.has_pending_work()
    assert engine.there(1) == [1]
    engine.now += DEADLINE_S + 1
    engine.poll()
    assert {job: result.success for job, result in engine.results.items()} == {
        load: False,
        store: False,
    }
    assert not engine.tier.has_pending_work()
    # Nothing is offered or stored until the file system answers.
    assert engine.there(1, 2) == []
    assert engine.load(1) == []
    refused = engine.begin_store(5)
    engine.poll()
    assert refused in engine.results
    engine.tier.erase([key_of(99)])
    hang.released.set()
    engine.disk.faults.clear()
    while engine.tier.is_stalled:
        engine.poll()
    assert not engine.region[10:12].any(), "rows of an abandoned job were written"
    assert engine.load(1, 2) == [1, 2]


def test_rows_of_an_abandoned_store_are_not_read(engine: Engine) -> None:
    """vLLM has other KV in them by then."""
    hang = Hang()
    engine.disk.faults["create"] = hang
    engine.begin_store(1, 2)
    assert hang.reached.wait(30)
    late = engine.begin_store(3, 4, 5, 6)
    engine.now += DEADLINE_S + 1
    engine.poll()
    engine.region[:] = 0
    hang.released.set()
    engine.disk.faults.clear()
    while engine.tier.is_stalled or engine.tier.num_abandoned:
        engine.poll()
    assert not engine.results[late].success
    there = engine.there(1, 2, 3, 4, 5, 6)
    assert engine.load(*there) == there
    assert engine.tier.used_bytes == len(there) * RECORD_BYTES


def test_a_restart_keeps_order_and_durability(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for number in (1, 2, 3):
        engine.store(number)
    engine.tier.touch([key_of(1)])
    engine.tier.set_durable([key_of(2)], True)
    engine.tier.shutdown()
    engine = Engine(tmp_path, slots=3)
    engine.store(4)
    assert engine.there(1, 2, 3, 4) == [1, 2, 4]
    engine.tier.shutdown()


def test_a_clock_that_was_ahead_is_forgotten_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, slots=4)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 2.0**33)
        engine.store(1, 2, 3, 4)
    engine.tier.shutdown()
    engine = Engine(tmp_path, slots=4)
    engine.store(5)
    engine.store(6)
    assert len(engine.there(1, 2, 3, 4)) == 2
    assert engine.there(5, 6) == [5, 6]
    engine.tier.shutdown()


@pytest.mark.parametrize("durable", [False, True])
def test_a_clock_that_is_set_back_keeps_what_is_stored_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    engine = Engine(tmp_path, slots=4)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 2.0**33)
        engine.store(1, 2, 3, 4, durable=durable)
    engine.store(5, durable=durable)
    engine.store(6, durable=durable)
    assert len(engine.there(1, 2, 3, 4)) == 2
    assert engine.there(5, 6) == [5, 6]
    engine.tier.shutdown()


def test_shutdown_writes_what_was_begun(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.begin_store(*range(10))
    engine.tier.shutdown()
    assert len(Engine(tmp_path).there(*range(10))) == 10


def test_errors_outside_of_the_disk_leave_no_slot_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(engine.tier.folder, "new", fails)
        assert not engine.store(1).success
    assert engine.tier.used_bytes == 0
    engine.now += 1000.0
    assert engine.store(1).success
    with monkeypatch.context() as broken:
        broken.setattr(Database, "forget_deleted", fails)
        engine.tier.erase([key_of(1)])
        engine.tier.drain_jobs()
        engine.poll()
    assert engine.tier.used_bytes == 0


def test_a_record_that_is_no_row_is_unreadable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(1)
    with monkeypatch.context() as broken:
        broken.setattr(engine.tier.folder, "read", lambda _: b"short")
        assert engine.load(1) == []
    assert engine.tier.counts["unreadable"] == 1
    assert engine.tier.used_bytes == RECORD_BYTES
    engine.now += 1000.0
    assert engine.store(1).success, "it is a victim, and no longer read"


def is_open(path: str) -> bool:
    """Whether this process has a file open."""
    numbers = os.listdir("/proc/self/fd")
    paths = [f"/proc/self/fd/{number}" for number in numbers]
    return path in [os.readlink(it) for it in paths if os.path.islink(it)]


def test_the_journal_is_closed_with_the_store(engine: Engine) -> None:
    journal = engine.tier.journal()
    journal.kept("entry", 0, 1, [bytes(32)])
    assert is_open(engine.tier.folder.journal)
    engine.tier.shutdown()
    assert not is_open(engine.tier.folder.journal)
