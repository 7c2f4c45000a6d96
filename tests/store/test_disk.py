# SPDX-License-Identifier: Apache-2.0
"""Files on the device: made once, by one, and locked by one or by those who share."""

import os
from pathlib import Path

import pytest

from segreuse_store.disk import Disk
from segreuse_store.format import TRAILER_BYTES, record_bytes

DISK = Disk()


def test_a_file_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    DISK.write(path, [b"first", memoryview(b" part")])
    with pytest.raises(FileExistsError):
        DISK.write(path, [b"second"])
    assert Path(path).read_bytes() == b"first part"
    os.close(descriptor := DISK.create(str(tmp_path / "other")))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_no_program_that_is_started_has_the_descriptors(tmp_path: Path) -> None:
    lock = DISK.lock(str(tmp_path / "lock"))
    assert lock is not None
    for descriptor in (lock, DISK.create(str(tmp_path / "file"))):
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_a_file_is_read_up_to_the_room_that_there_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    for room, held in ((8, b"abcdef\0\0"), (6, b"abcdef"), (4, b"abcd"), (0, b"")):
        into = bytearray(room)
        assert DISK.read(str(tmp_path / "file"), memoryview(into)) == min(room, 6)
        assert into == held


def test_what_is_written_in_pieces_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = Disk(), DISK.append
    monkeypatch.setattr(disk, "append", lambda to, data: write(to, data[:3]))
    disk.write(str(tmp_path / "file"), [b"abcdefgh", b"", b"ij"])
    assert (tmp_path / "file").read_bytes() == b"abcdefghij"


def test_no_call_keeps_a_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file, disk = str(tmp_path / "file"), Disk()
    monkeypatch.setattr(disk, "append", lambda *_: os.write(-1, b""))
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.write(file, [b"content"])
    DISK.remove(file)
    DISK.write(file, [b"content"])
    DISK.read(file, memoryview(bytearray(8)))
    DISK.sync_folder(str(tmp_path))
    lock = DISK.lock(file)
    assert lock is not None
    assert DISK.lock(file) is None
    os.close(lock)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_device_has_what_was_written_and_names_of_a_folder_once_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda it: synced.append(os.readlink(f"/proc/self/fd/{it}")))
    DISK.write(str(tmp_path / "file"), [b"content"])
    DISK.sync_folder(str(tmp_path))
    assert synced == [str(tmp_path / "file"), str(tmp_path)]


def test_a_lock_is_of_one_or_of_those_who_share_it(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    alone = DISK.lock(path)
    assert alone is not None
    assert DISK.lock(path) is DISK.lock(path, shared=True) is None
    DISK.share(alone)
    second = DISK.lock(path, shared=True)
    assert second is not None
    assert DISK.lock(path) is None
    os.close(alone)
    assert DISK.lock(path) is None
    os.close(second)
    last = DISK.lock(path)
    assert last is not None
    DISK.replace(last, b"a longer text")
    DISK.replace(last, b"short")
    assert Path(path).read_bytes() == b"short"
    DISK.replace(last, b"")
    os.close(last)
    assert Path(path).read_bytes() == b""


def test_a_lock_that_cannot_be_had_at_all_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems without locks."""
    monkeypatch.setattr("fcntl.flock", lambda *_: os.write(-1, b""))
    with pytest.raises(OSError, match="Bad file descriptor"):
        DISK.lock(str(tmp_path / "lock"))


def test_a_record_takes_whole_pages_of_the_device() -> None:
    most = 2 * 4096 - TRAILER_BYTES
    assert [record_bytes(size) for size in (0, 1, most, most + 1)] == [4096, 4096, 8192, 12288]
