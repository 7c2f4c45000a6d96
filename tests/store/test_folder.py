# SPDX-License-Identifier: Apache-2.0
"""A store of files: what is written is read again, and nothing else ever is."""

import errno
import hashlib
import os
import re
import sqlite3
import stat
import time
from pathlib import Path

import pytest
import xxhash

from segreuse_store.database import Notes
from segreuse_store.folder import LostError, RecordFolder
from segreuse_store.format import HEAD_BYTES, TRAILER_BYTES, StoredRecord
from tests.store import records
from tests.store.records import (
    SLOTS,
    FaultyDisk,
    folder,
    key_of,
    no_file_grows,
    payload_of,
    raises,
    record,
    write,
)


def reopened(store: RecordFolder, path: Path) -> dict[bytes, StoredRecord]:
    store.close()
    again = folder(path)
    found = {kept.key: kept for kept in again.at_start}
    again.close()
    return found


def database(store: RecordFolder) -> sqlite3.Connection:
    return sqlite3.connect(os.path.join(store.path, "records.sqlite"))


def test_records_outlive_a_restart(tmp_path: Path) -> None:
    store = folder(tmp_path)
    labels = [store.digest(b"alice")]
    given = [record(0), record(1, labels=labels), record(2)]
    store.write([(store.new(it), payload_of(n)) for n, it in enumerate(given)], SLOTS)
    store.close()
    store = folder(tmp_path)
    assert [kept.key for kept in store.at_start] == [key_of(0), key_of(1), key_of(2)]
    for number, kept in enumerate(store.at_start):
        assert bytes(store.read(kept)) == payload_of(number)
        assert kept._replace(name="", secret=b"") == given[number]


def test_records_of_a_batch_keep_their_order_though_the_clock_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder(tmp_path)
    order = (2, 0, 1)
    batch = [(store.new(record(number)), payload_of(number)) for number in order]
    now_s = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now_s)
        store.write(batch, SLOTS)
    assert list(reopened(store, tmp_path)) == [key_of(number) for number in order]


def test_digests_of_labels_are_those_of_one_store(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "first"), folder(tmp_path / "second")
    assert first.digest(b"alice") != first.digest(b"bob")
    assert first.digest(b"alice") != second.digest(b"alice")
    digest = first.digest(b"alice")
    first.close()
    assert folder(tmp_path / "first").digest(b"alice") == digest


def test_labels_are_in_no_file(tmp_path: Path) -> None:
    store = folder(tmp_path)
    kept = store.new(record(0, labels=[store.digest(b"the salt of alice")]))
    store.write([(kept, payload_of(0))], SLOTS)
    store.close()
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"the salt of alice" not in file.read_bytes()


def test_others_may_read_nothing(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = folder(tmp_path / "store")
        write(store, 0)
    finally:
        os.umask(old)
    for found in (tmp_path / "store").rglob("*"):
        assert stat.S_IMODE(found.stat().st_mode) & 0o077 == 0, found


@pytest.mark.parametrize(
    "at", [0, 17, records.PAYLOAD_BYTES, records.PAYLOAD_BYTES + TRAILER_BYTES - 1]
)
def test_one_flipped_bit_is_noticed(tmp_path: Path, at: int) -> None:
    store = folder(tmp_path)
    write(store, 0)
    (file,) = records.files(tmp_path)
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)
    store.close()
    store = folder(tmp_path)
    with pytest.raises(LostError, match="corrupt"):
        store.read(store.at_start[0])


def test_every_byte_of_the_trailer_is_verified(tmp_path: Path) -> None:
    store = folder(tmp_path)
    kept = store.new(record(0))
    store.write([(kept, payload_of(0))], SLOTS)
    (file,) = records.files(tmp_path)
    content = file.read_bytes()
    for at in range(records.PAYLOAD_BYTES, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(LostError, match="corrupt"):
            store.read(kept)


@pytest.mark.parametrize("kind", [0, 2])
def test_a_file_is_what_every_version_of_the_store_reads(tmp_path: Path, kind: int) -> None:
    """The payload; 100 bytes that say what it is of; 28 that prove both."""
    store = RecordFolder(str(tmp_path), records.FINGERPRINT, records.PAYLOAD_BYTES, kind=kind)
    kept = store.new(record(5))
    store.write([(kept, payload_of(5))], SLOTS)
    key = (Path(store.path) / "digests.key").read_bytes()
    assert len(key) == 32
    header = b"".join(
        [
            b"SEGREUSE",
            b"\1\0",
            bytes([kind, 0]),
            hashlib.blake2b(key_of(5), digest_size=32, key=key).digest(),
            records.FINGERPRINT,
            record(5).about[:12],
            (8192).to_bytes(8, "little"),
            bytes(4),
        ]
    )
    proof = xxhash.xxh3_128(payload_of(5) + header).digest()
    (file,) = records.files(tmp_path)
    assert file.read_bytes() == payload_of(5) + header + bytes(12) + proof
    assert re.fullmatch("[0-9a-f]{32}", file.name)
    assert (file.parent.name, file.parent.parent.name) == (kept.name[:2], "files")
    store.close()


def test_exchanged_files_are_noticed(tmp_path: Path) -> None:
    """Of records that differ in nothing but key and text."""
    store = folder(tmp_path)
    head = record(0).about[:HEAD_BYTES]
    both = record(0), record(1)._replace(about=head + record(1).about[HEAD_BYTES:])
    kept = [store.new(found) for found in both]
    store.write([(kept[0], payload_of(0)), (kept[1], payload_of(1))], SLOTS)
    first, second = records.files(tmp_path)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for row in kept:
        with pytest.raises(LostError, match="corrupt"):
            store.read(row)


@pytest.mark.parametrize("size", [0, 1, records.PAYLOAD_BYTES, 100_000])
def test_files_of_another_size_are_torn(tmp_path: Path, size: int) -> None:
    store = folder(tmp_path)
    kept = store.new(record(0))
    store.write([(kept, payload_of(0))], SLOTS)
    (file,) = records.files(tmp_path)
    os.truncate(file, size)
    with pytest.raises(LostError, match="torn"):
        store.read(kept)
    assert reopened(store, tmp_path) == {}
    assert records.files(tmp_path) == []


def test_a_row_without_a_file_is_a_miss(tmp_path: Path) -> None:
    store = folder(tmp_path)
    kept = store.new(record(0))
    store.write([(kept, payload_of(0))], SLOTS)
    (file,) = records.files(tmp_path)
    file.unlink()
    with pytest.raises(LostError, match="missing"):
        store.read(kept)
    assert reopened(store, tmp_path) == {}
    with database(store) as sql:
        assert sql.execute("SELECT count(*) FROM records").fetchone() == (0,)


def test_a_file_without_a_row_is_removed(tmp_path: Path) -> None:
    store = folder(tmp_path)
    write(store, 0)
    (file,) = records.files(tmp_path)
    garbage = file.with_name("0" * 32)
    garbage.write_bytes(file.read_bytes())
    foreign = file.with_name("notes.txt")
    foreign.write_text("of somebody else")
    assert set(reopened(store, tmp_path)) == {key_of(0)}
    assert not garbage.exists()
    assert file.exists()
    assert foreign.exists()


@pytest.mark.parametrize("column", ["name", "about"])
def test_a_damaged_row_is_removed(tmp_path: Path, column: str) -> None:
    store = folder(tmp_path)
    write(store, 0, 1)
    (value,) = database(store).execute(f"SELECT {column} FROM records ORDER BY used").fetchone()
    damaged = value[:-1] + ("g" if isinstance(value, str) else bytes([value[-1] ^ 1]))
    with database(store) as sql:
        sql.execute(f"UPDATE records SET {column} = ? WHERE {column} = ?", (damaged, value))
    assert len(reopened(store, tmp_path)) == 1
    assert len(records.files(tmp_path)) == 1


def test_what_is_known_of_another_record_is_damage(tmp_path: Path) -> None:
    """They would be found, and lead to KV of other tokens."""
    store = folder(tmp_path)
    kept = [store.new(record(number)) for number in (0, 1)]
    store.write([(kept[0], payload_of(0)), (kept[1], payload_of(1))], SLOTS)
    with database(store) as sql:
        other = "(SELECT about FROM records WHERE name = ?)"
        sql.execute(f"UPDATE records SET about = {other}", (kept[0].name,))
    assert reopened(store, tmp_path) == {key_of(0): kept[0]}


def test_a_record_is_there_once_its_file_is(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = folder(tmp_path, disk=disk)
    rows: list[int] = []

    def count() -> None:
        with database(store) as sql:
            rows.extend(sql.execute("SELECT count(*) FROM records WHERE state = 1").fetchone())

    disk.faults |= dict.fromkeys(("create", "sync", "sync_folder"), count)
    write(store, 0, 1)
    assert set(rows) == {0}
    disk.faults = {"remove": count}
    rows.clear()
    store.close()
    store = folder(tmp_path, disk=disk)
    store.remove([kept.name for kept in store.at_start])
    assert rows == [0, 0]


def test_without_its_key_a_store_begins_anew(tmp_path: Path) -> None:
    store = folder(tmp_path)
    write(store, 0)
    os.truncate(os.path.join(store.path, "digests.key"), 31)
    assert reopened(store, tmp_path) == {}
    assert records.files(tmp_path) == []


@pytest.mark.parametrize("damage", [b"no database at all", None])
def test_a_damaged_database_begins_anew(tmp_path: Path, damage: bytes | None) -> None:
    store = folder(tmp_path)
    write(store, *range(40))
    store.close()
    file = Path(store.path) / "records.sqlite"
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(damage or content[:4096] + b"\xff" * middle + content[4096 + middle :])
    store = folder(tmp_path)
    assert store.at_start == []
    assert records.files(tmp_path) == []
    write(store, 3)
    assert set(reopened(store, tmp_path)) == {key_of(3)}


def test_stores_of_other_models_stay_as_they_are(tmp_path: Path) -> None:
    store = folder(tmp_path)
    write(store, 0)
    store.close()
    other = folder(tmp_path, fingerprint=bytes(32))
    assert other.at_start == []
    other.close()
    assert [kept.key for kept in folder(tmp_path).at_start] == [key_of(0)]


def test_a_file_of_another_model_is_not_read(tmp_path: Path) -> None:
    ours, others = folder(tmp_path / "ours"), folder(tmp_path / "others", fingerprint=bytes(32))
    kept = ours.new(record(0))
    ours.write([(kept, payload_of(0))], SLOTS)
    write(others, 0)
    (file,), (foreign,) = records.files(tmp_path / "ours"), records.files(tmp_path / "others")
    file.write_bytes(foreign.read_bytes())
    with pytest.raises(LostError, match="corrupt"):
        ours.read(kept)


def test_removed_records_are_gone(tmp_path: Path) -> None:
    store = folder(tmp_path)
    kept = [store.new(record(number)) for number in (0, 1)]
    store.write([(kept[0], payload_of(0)), (kept[1], payload_of(1))], SLOTS)
    store.remove([kept[0].name])
    store.remove([kept[0].name])  # again, as after an error
    assert len(records.files(tmp_path)) == 1
    assert set(reopened(store, tmp_path)) == {key_of(1)}


def test_an_old_removal_leaves_a_new_record_of_the_same_key(tmp_path: Path) -> None:
    store = folder(tmp_path)
    old, new = store.new(record(0)), store.new(record(0))
    store.write([(old, payload_of(0))], SLOTS)
    store.remove([old.name])
    store.write([(new, payload_of(0))], SLOTS)
    store.remove([old.name])
    assert bytes(store.read(new)) == payload_of(0)
    assert set(reopened(store, tmp_path)) == {key_of(0)}


def test_uses_and_durable_ones_are_noted(tmp_path: Path) -> None:
    store = folder(tmp_path)
    kept = [store.new(record(number)) for number in (0, 1)]
    store.write([(row, payload_of(number)) for number, row in enumerate(kept)], SLOTS)
    store.remember(Notes({kept[0].name: 1e12}, {key_of(1): True}))
    store.note()
    store.close()
    found = folder(tmp_path).at_start
    assert [(row.key, row.durable) for row in found] == [(key_of(1), True), (key_of(0), False)]


def test_what_could_not_be_noted_is_noted_with_the_next(tmp_path: Path) -> None:
    store = folder(tmp_path)
    kept = [store.new(record(number)) for number in (0, 1)]
    store.write([(row, payload_of(number)) for number, row in enumerate(kept)], SLOTS)
    store.remember(Notes({kept[0].name: 1e12}, {key_of(0): True, key_of(1): True}))
    with no_file_grows(), pytest.raises(OSError, match="the database of the store"):
        store.note()
    store.remember(Notes({}, {key_of(0): False}))
    store.note()
    store.close()
    found = folder(tmp_path).at_start
    assert [(row.key, row.durable) for row in found] == [(key_of(1), True), (key_of(0), False)]


@pytest.mark.parametrize("call", ["create", "append", "sync", "sync_folder"])
def test_what_fails_is_not_stored(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    store = folder(tmp_path, disk=disk)
    disk.faults[call] = raises(errno.EIO)
    kept = store.new(record(0))
    with pytest.raises(OSError, match="made by the test"):
        store.write([(kept, payload_of(0))], SLOTS)
    disk.faults.clear()
    store.remove([kept.name])
    assert records.files(tmp_path) == []
    assert reopened(store, tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.faults["lock"] = raises(errno.EROFS)
    with pytest.raises(OSError, match="made by the test"):
        folder(tmp_path, disk=disk)
    with pytest.raises(OSError, match="Not a directory"):
        folder(Path("/dev/null/store"))
