# SPDX-License-Identifier: Apache-2.0
"""Engines that share a store of files: what one writes the others find, the budget is that of all,
and whatever one removes is a miss elsewhere."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from segreuse_store import database
from segreuse_store.disk import Disk
from segreuse_store.encryption import Aes256Gcm
from segreuse_store.folder import LostError
from segreuse_store.leases import Leases, Owner
from segreuse_store.sealing import Checksum
from tests.store import records
from tests.store.records import (
    SLOTS,
    Hang,
    about_of,
    folder,
    key_of,
    no_file_grows,
    payload_of,
    record,
    write,
)
from tests.store.test_file_store import RECORD_BYTES, Engine

if TYPE_CHECKING:
    from typing_extensions import Buffer

Start = Callable[..., Engine]


class Shared(Engine):
    """One of several engines."""

    def see(self) -> None:
        """What the others have done by now."""
        self.tier.watcher.look()
        self.poll()

    def note(self) -> None:
        """Have the others see what was used, and what is durable."""
        self.tier.note()
        self.tier.drain_jobs()
        self.poll()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Shared]]:
    started: list[Shared] = []

    def begin(slots: int = 100, name: str = "") -> Shared:
        manifest = tmp_path / f"{name}.manifest"
        manifest.touch()
        started.append(Shared(tmp_path / "store", slots, Owner(str(manifest)) if name else None))
        return started[-1]

    yield begin
    for engine in started:
        engine.disk.faults.clear()
        engine.tier.shutdown()


def test_what_one_engine_writes_another_finds_and_reads(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    first.store(1, 2)
    assert second.there(1, 2) == []
    second.see()
    assert sorted(second.events()) == [(1, False), (2, False)]
    assert second.load(1, 2) == [1, 2]
    assert second.tier.counts == {"found": 2, "loaded": 2, "shared": 2}
    found = second.tier.claim(b"alice")
    labels = [second.tier.digest(b"alice")]
    assert sorted(it.about for it in found) == sorted(about_of(n, labels) for n in (1, 2))
    assert second.tier.claim(b"alice") == []
    assert second.tier.claim(b"bob") == []
    assert len(records.files(tmp_path / "store")) == 2
    assert first.tier.counts == {"stored": 2}, "its own are no finds"


def test_it_is_found_without_being_looked_for(start: Start) -> None:
    first, second = start(), start()
    first.store(1)
    for _ in range(1000):
        if second.tier.claim(b"alice"):
            break
        time.sleep(0.01)
    assert second.load(1) == [1]


def test_records_of_a_label_that_was_named_before_are_found_with_the_next_request(
    start: Start,
) -> None:
    first, second = start(), start()
    assert second.tier.claim(b"alice") == []
    first.store(1)
    second.see()
    assert len(second.tier.claim(b"alice")) == 1


@pytest.mark.parametrize("forgotten", [False, True], ids=["by name", "all of them"])
def test_what_could_not_be_read_is_found_when_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    class Faulty(Checksum):
        fails = True

        def open(self, secret: bytes, context: bytes, sealed: Buffer, proof: Buffer) -> Buffer:
            if self.fails:
                raise OSError("made by the test")
            return super().open(secret, context, sealed, proof)

    first, second = folder(tmp_path), folder(tmp_path, sealer := Faulty())
    if forgotten:
        monkeypatch.setattr(database, "_MOST_CHANGES", 1)
    write(first, 1, 2)
    with pytest.raises(OSError, match="made by the test"):
        second.changes()
    sealer.fails = False
    assert {found.key for found in second.changes().coming} == {key_of(1), key_of(2)}
    assert second.changes().coming == []


def test_what_both_compute_is_stored_once(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    first.store(1, 2)
    assert second.store(2, 3).success  # it has not seen them yet
    assert len(records.files(tmp_path / "store")) == 3
    assert second.tier.counts == {"stored": 1, "found": 1}
    assert second.there(1, 2, 3) == [2, 3]
    assert second.load(2, 3) == [2, 3]


def test_the_budget_is_that_of_all_engines(start: Start, tmp_path: Path) -> None:
    engines = [start(slots=4), start(slots=4)]
    for number in range(12):
        engines[number % 2].store(number)
        assert len(records.files(tmp_path / "store")) <= 4
    for engine in engines:
        engine.see()
        assert engine.there(*range(12)) == [8, 9, 10, 11]
        assert engine.load(8, 9, 10, 11) == [8, 9, 10, 11]
        assert engine.tier.used_bytes == 4 * RECORD_BYTES


def test_what_another_engine_uses_is_used(start: Start) -> None:
    first, second = start(slots=2), start(slots=2)
    first.store(1)
    first.store(2)
    second.see()
    second.tier.touch([key_of(1)])
    second.now += 2.0
    second.poll()
    second.tier.drain_jobs()
    first.store(3)
    assert first.there(1, 2, 3) == [1, 3]


@pytest.mark.parametrize("how", ["room", "erase", "damage"])
def test_what_one_engine_removes_is_a_miss_elsewhere(
    start: Start, tmp_path: Path, how: str
) -> None:
    first, second = start(slots=1), start(slots=1)
    first.store(1)
    second.see()
    assert second.there(1) == [1]
    if how == "room":
        first.store(2)
    elif how == "erase":
        first.tier.erase([key_of(1)])
        first.tier.drain_jobs()
    else:
        (file,) = records.files(tmp_path / "store")
        os.truncate(file, 17)
        assert first.load(1) == []
    assert second.load(1) == [], "it has not seen it yet"
    second.see()
    assert second.there(1) == []
    second.store(1)
    first.see()
    assert first.load(1) == [1]
    assert first.tier.used_bytes == second.tier.used_bytes == RECORD_BYTES


def test_a_reader_never_gets_what_came_in_the_place_of_a_record(tmp_path: Path) -> None:
    first, second = folder(tmp_path), folder(tmp_path)
    write(first, 1)
    (seen,) = second.changes().coming
    first.remove([seen.name])
    write(first, 1, 2)
    with pytest.raises(LostError, match="missing"):
        second.read(seen)
    changes = second.changes()
    assert changes.gone == [seen.name]
    for kept in changes.coming:
        assert bytes(second.read(kept)) == payload_of(1 if kept.key == key_of(1) else 2)
    assert len(changes.coming) == 2


def test_who_has_missed_too_much_reads_all_rows(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_MOST_CHANGES", 3)
    first, second = start(slots=3), start(slots=3)
    second.store(0)
    first.store(1)
    second.see()
    for number in range(2, 9):
        first.store(number)
    second.see()
    assert second.there(*range(1, 9)) == [6, 7, 8]
    assert second.load(6, 7, 8) == [6, 7, 8]


def test_what_engines_tell_each_other_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_MOST_CHANGES", 5)
    store = folder(tmp_path)
    (path,) = tmp_path.glob("*/records.sqlite")
    with closing(sqlite3.connect(path)) as sql:
        for number in range(20):
            write(store, number)
            (rows,) = sql.execute("SELECT count(*) FROM changes").fetchone()
            assert rows == min(number + 1, 5)
    store.close()


def test_an_engine_may_miss_a_hundred_thousand_changes(tmp_path: Path) -> None:
    """One more, and it reads all rows."""
    store = folder(tmp_path)
    write(store, 0)
    (path,) = tmp_path.glob("*/records.sqlite")
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("DELETE FROM changes")
        rows = ((number, "of another", 0) for number in range(2, 100_002))
        sql.executemany("INSERT INTO changes VALUES (?, ?, ?)", rows)
        sql.commit()
        kept = sql.execute("SELECT min(number), count(*) FROM changes").fetchone()
        assert kept == (2, 100_000)
        write(store, 1)
        kept = sql.execute("SELECT min(number), count(*) FROM changes").fetchone()
        assert kept == (3, 100_000)
    store.close()


def test_so_many_engines_of_one_owner_may_use_a_store_and_no_more(tmp_path: Path) -> None:
    leases = [Leases(str(tmp_path), Owner(), Disk()) for _ in range(65)]
    for lease in leases[:64]:
        with lease.opening():
            pass
    assert [lease.alone for lease in leases[:64]] == [True, *[False] * 63]
    assert [lease.name.partition("-")[2] for lease in leases[:64]] == [*map(str, range(64))]
    with pytest.raises(OSError, match=r"all 64 leases of .* are held"), leases[64].opening():
        pass
    leases[3].close()
    with leases[64].opening():
        assert leases[64].name == leases[3].name
    for lease in leases:
        lease.close()


def test_who_finds_a_store_being_opened_waits_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr("segreuse_store.leases.time", clock)
    lease = Leases(str(tmp_path), Owner(), Disk())
    opening = Disk().lock(str(tmp_path / "opening"))
    assert opening is not None
    with (
        pytest.raises(OSError, match=r"is being opened by another engine for 60 s"),
        lease.opening(),
    ):
        pass
    assert 60 <= now_s < 60.1
    os.close(opening)
    with lease.opening():
        assert lease.alone
    lease.close()


def test_no_lease_is_said_to_have_expired_while_an_engine_opens_the_store(tmp_path: Path) -> None:
    lease = Leases(str(tmp_path), Owner(), Disk())
    with lease.opening():
        assert lease.expired({"of nobody", lease.name}) == set()
    for _ in range(2):  # whoever looks takes no lease
        assert lease.expired({"of nobody", lease.name}) == {"of nobody"}
    lease.close()


def test_owners_have_names_of_their_own_that_a_restart_finds_again() -> None:
    owners = [Owner(), Owner(rank=1), Owner("a"), Owner("a", 1), Owner("b")]
    assert len({owner.name for owner in owners}) == 5
    assert {len(owner.name) for owner in owners} == {16}
    assert Owner("a").name == Owner(os.path.abspath("a")).name == Owner("./a", 0).name


# Documents of knowledge bases.


def test_a_running_engines_documents_make_no_room_for_others(start: Start) -> None:
    first, second = start(slots=2, name="one"), start(slots=2, name="two")
    first.store(1, durable=True)
    second.store(2, durable=True)
    for number in (3, 4):
        second.store(number, durable=number == 4)
    second.see()
    first.see()
    assert second.there(1, 2, 3, 4) == [1, 4], "it has given up its own"
    assert first.load(1) == [1]
    second.tier.shutdown()
    first.store(5, durable=True)
    first.store(6)
    assert first.there(1, 4, 5, 6) == [1, 5], "that engine has stopped"


def test_documents_of_a_stopped_engine_make_no_room_for_ordinary_records(start: Start) -> None:
    first, second = start(slots=1, name="one"), start(slots=1, name="two")
    first.store(1, durable=True)
    first.tier.shutdown()
    second.store(2)
    assert second.tier.counts["full"] == 1
    assert start(slots=1, name="one").there(1) == [1]


def test_a_start_that_fails_on_a_full_disk_gives_up_no_documents(start: Start) -> None:
    first = start(slots=1, name="one")
    first.store(1, durable=True)
    first.tier.shutdown()
    with no_file_grows(), pytest.raises(OSError, match="File too large"):
        start(slots=1, name="one")
    second = start(slots=1, name="two")
    second.store(2)
    assert second.there(1, 2) == [1]


def test_a_document_that_was_there_already_is_released_for_good(start: Start) -> None:
    engine = start(slots=1, name="one")
    engine.store(1)
    engine.tier.set_durable([key_of(1)], True)
    engine.store(1, durable=True)  # nothing is written, nor noted yet
    engine.tier.erase([key_of(1)])
    engine.tier.drain_jobs()
    engine.poll()
    engine.tier.folder.note()
    engine.store(1)
    engine.store(2)
    assert engine.there(1, 2) == [2], "nobody holds the first one any more"


def test_a_document_of_two_engines_goes_when_both_have_released_it(
    start: Start, tmp_path: Path
) -> None:
    first, second = start(name="one"), start(name="two")
    first.store(1, durable=True)
    second.tier.set_durable([key_of(1)], True)
    second.note()
    for engine, files in ((first, 1), (second, 0)):
        engine.tier.erase([key_of(1)])
        engine.tier.drain_jobs()
        engine.poll()
        assert len(records.files(tmp_path / "store")) == files
    assert second.there(1) == []


def test_an_engine_that_adds_a_document_again_while_it_releases_it_holds_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(name="one"), start(name="two")
    first.store(1, durable=True)
    second.tier.set_durable([key_of(1)], True)
    second.note()
    hang, release = Hang(), first.tier.folder.release
    monkeypatch.setattr(first.tier.folder, "release", lambda keys: (hang(), release(keys))[1])
    first.tier.erase([key_of(1)])
    assert hang.reached.wait(30)
    first.tier.set_durable([key_of(1)], True)
    first.tier.remember()
    first.tier.folder.note()
    hang.released.set()
    first.tier.drain_jobs()
    first.poll()
    first.note()
    second.tier.erase([key_of(1)])
    second.tier.drain_jobs()
    second.poll()
    assert len(records.files(tmp_path / "store")) == 1


def test_what_another_engine_holds_is_durable_when_it_is_stored_again(start: Start) -> None:
    first, second = start(slots=1, name="one"), start(slots=1, name="two")
    first.tier.set_durable([key_of(1)], True)
    first.note()
    second.store(1)
    second.store(2)
    assert second.there(1, 2) == [1]


def test_what_is_erased_while_another_engine_writes_it_is_not_stored(
    start: Start, tmp_path: Path
) -> None:
    first, second = start(slots=1), start(slots=1)
    first.store(7)  # what it makes room for
    hang = Hang()
    first.disk.faults["create"] = hang
    job = first.begin_store(1)
    assert hang.reached.wait(30)
    second.tier.erase([key_of(1)])
    second.tier.drain_jobs()
    hang.released.set()
    assert first.finish(job).success
    assert first.there(1) == []
    assert records.files(tmp_path / "store") == []
    assert first.tier.used_bytes == 0
    first.disk.faults.clear()
    assert first.store(1).success
    second.see()
    assert second.load(1) == [1]


def test_documents_without_a_manifest_are_given_up_by_the_next_engine(
    start: Start, tmp_path: Path
) -> None:
    first = start(slots=1, name="one")
    first.store(1, durable=True)
    journal = Path(first.tier.folder.journal)
    journal.touch()
    first.tier.shutdown()
    start(slots=1, name="two").store(2)
    assert journal.exists()
    (tmp_path / "one.manifest").unlink()
    third = start(slots=1, name="three")
    assert not journal.exists()
    third.store(3)
    assert third.there(1, 3) == [3]


def test_a_relative_manifest_is_looked_for_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that share a store run in folders of their own."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    Path("manifest").touch()
    store = folder(tmp_path / "store", owner=Owner("manifest"))
    journal = Path(store.journal)
    journal.touch()
    store.close()
    monkeypatch.chdir(tmp_path / "b")
    folder(tmp_path / "store", owner=Owner("other")).close()
    assert journal.exists()
    (tmp_path / "a" / "manifest").unlink()
    folder(tmp_path / "store", owner=Owner("other")).close()
    assert not journal.exists()


def test_a_lease_whose_manifest_nobody_can_look_for_is_kept(tmp_path: Path) -> None:
    """What its lock holds is torn, or relative to a folder that nobody knows."""
    store = folder(tmp_path / "store", owner=Owner("manifest"))
    journal = Path(store.journal)
    journal.touch()
    store.close()
    journal.with_suffix(".lock").write_text("nowhere/manifest")
    folder(tmp_path / "store", owner=Owner("other")).close()
    assert journal.exists()
    journal.with_suffix(".lock").write_text("/nowhere/manifest")
    folder(tmp_path / "store", owner=Owner("other")).close()
    assert not journal.exists()


def test_what_has_gone_is_not_remembered_for_a_label_that_nobody_names(start: Start) -> None:
    first, second = start(slots=2), start(slots=2)
    for number in range(6):
        first.store(number)
        second.see()
    assert second.tier.num_unclaimed == 2
    assert len(second.tier.claim(b"alice")) == 2


# Opening, and leases.


def test_an_engine_gets_its_lease_again(tmp_path: Path) -> None:
    stores = [folder(tmp_path, owner=Owner(*owner)) for owner in (("a", 0), ("a", 1), ("b", 0))]
    leases = [Path(store.journal).stem for store in stores]
    assert len(set(leases)) == 3
    for store in stores:
        store.close()
    again = folder(tmp_path, owner=Owner("b", 0))
    assert Path(again.journal).stem == leases[2]
    twice = folder(tmp_path, owner=Owner("b", 0))
    assert Path(twice.journal).stem == leases[2].replace("-0", "-1")
    assert twice.journal != again.journal


def test_engines_that_open_and_write_at_once_share_one_store(tmp_path: Path) -> None:
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            try:
                store = folder(tmp_path)
                for more in range(5):
                    write(store, 10 * number + more)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    store = folder(tmp_path)
    assert {kept.key for kept in store.at_start} == {
        key_of(10 * number + more) for number in range(4) for more in range(5)
    }


def test_a_damaged_database_is_not_replaced_while_others_use_it(tmp_path: Path) -> None:
    first = folder(tmp_path)
    write(first, 1)
    (Path(first.path) / "records.sqlite-wal").unlink()
    (Path(first.path) / "records.sqlite").write_bytes(b"no database at all")
    with pytest.raises(OSError, match="stop them all, then start"):
        folder(tmp_path)


def test_a_store_whose_key_is_lost_is_not_emptied_while_others_use_it(tmp_path: Path) -> None:
    first = folder(tmp_path)
    (stored,) = first.write([(first.new(record(1)), payload_of(1))], SLOTS).stored
    (Path(first.path) / "digests.key").unlink()
    with pytest.raises(OSError, match=r"digests.key is missing or torn, and other engines"):
        folder(tmp_path)
    with closing(sqlite3.connect(Path(first.path) / "records.sqlite")) as sql:
        assert sql.execute("SELECT name FROM records").fetchall() == [(stored.name,)]
    assert bytes(first.read(stored)) == payload_of(1)


def test_a_smaller_budget_removes_nothing_while_others_use_the_store(start: Start) -> None:
    first = start(slots=3)
    first.store(1, 2, 3)
    start(slots=1)
    assert first.load(1, 2, 3) == [1, 2, 3]


def test_encrypted_records_are_shared_by_engines_with_the_same_key(tmp_path: Path) -> None:
    first, second = folder(tmp_path, Aes256Gcm(bytes(32))), folder(tmp_path, Aes256Gcm(bytes(32)))
    other = folder(tmp_path, Aes256Gcm(b"x" * 32))
    write(first, 1)
    (seen,) = second.changes().coming
    assert bytes(second.read(seen)) == payload_of(1)
    assert other.changes().coming == []
    second.release([key_of(1)])
    with pytest.raises(LostError):
        first.read(seen)
    for file in Path(first.path).rglob("*"):
        assert not file.is_file() or seen.secret not in file.read_bytes(), file


# Crashes.


def dies_while_it_writes(path: Path) -> None:
    """An engine is killed in the midst of a write that another record makes room for."""
    child = os.fork()
    if not child:
        store = folder(path)
        store.disk.append = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        store.write([(store.new(record(9)), payload_of(9))], 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_an_engine_that_runs_ends_what_a_dead_one_has_begun(tmp_path: Path) -> None:
    store = folder(tmp_path)
    write(store, 1, 2)
    dies_while_it_writes(tmp_path)
    assert len(records.files(tmp_path)) == 2, "a record, and half of one"
    again = [(store.new(record(9)), payload_of(9))]
    assert store.write(again, 2).stored == [], "it may be alive"
    store.clean()
    assert len(records.files(tmp_path)) == 1
    assert store.slots_used == 1
    store.write(again, 2)
    kept = {found.key: found for found in folder(tmp_path).at_start}
    assert {*kept} == {key_of(2), key_of(9)}
    assert bytes(store.read(kept[key_of(9)])) == payload_of(9)


def test_what_a_running_engine_writes_is_left_alone(tmp_path: Path) -> None:
    first, second = folder(tmp_path), folder(tmp_path)
    seen: list[int] = []
    sync = first.disk.sync

    def look(descriptor: int) -> None:
        second.clean()
        seen.append(len(records.files(tmp_path)))
        sync(descriptor)

    first.disk.sync = look  # type: ignore[method-assign]
    written = first.write([(first.new(record(1)), payload_of(1))], SLOTS)
    assert seen == [1]
    assert bytes(second.read(written.stored[0])) == payload_of(1)
