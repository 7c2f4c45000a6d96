# SPDX-License-Identifier: Apache-2.0
"""What documents consist of outlives a process, in order; damage costs a computation at most."""

import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segreuse_store.journal import GroupJournal
from segreuse_store.sqlite import open_private
from tests.store.records import Hang

A, B, C = (bytes([letter]) * 32 for letter in b"abc")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "documents.sqlite")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The databases that journals open."""
    connections: list[sqlite3.Connection] = []

    def remembered(*args: Any, **named: Any) -> sqlite3.Connection:
        connections.append(open_private(*args, **named))
        return connections[-1]

    monkeypatch.setattr("segreuse_store.journal.open_private", remembered)
    return connections


def at_once(task: Callable[[], None]) -> None:
    task()


def hangs(sql: sqlite3.Connection, write: Callable[[], None]) -> tuple[Hang, threading.Thread]:
    """A write that hangs in another thread, in the midst of its first statement."""
    hang = Hang()
    sql.set_trace_callback(lambda statement: hang())
    thread = threading.Thread(target=write)
    thread.start()
    assert hang.reached.wait(30)
    return hang, thread


def reopened(path: str) -> list[tuple[str, int, int, list[bytes]]]:
    journal = GroupJournal(path, at_once)
    journal.close()
    return [tuple(part) for part in journal.at_start()]  # type: ignore[misc]


def test_what_is_kept_is_there_after_a_restart_and_what_is_released_is_not(path: str) -> None:
    journal = GroupJournal(path, at_once)
    assert journal.at_start() == []
    journal.kept("doc", 0, 2, [A, B])
    journal.kept("doc", 1, 2, [C])
    journal.kept("gone", 0, 1, [A])
    journal.kept("cut anew", 0, 1, [A])
    journal.released(["cut anew"])
    journal.kept("cut anew", 1, 2, [B])
    journal.released(["gone"])
    journal.close()
    assert sorted(reopened(path)) == [
        ("cut anew", 1, 2, [B]),
        ("doc", 0, 2, [A, B]),
        ("doc", 1, 2, [C]),
    ]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


def test_no_call_waits_for_the_file_and_changes_keep_their_order(
    path: str, opened: list[sqlite3.Connection]
) -> None:
    tasks: list[Callable[[], None]] = []
    journal = GroupJournal(path, tasks.append)
    journal.kept("first", 0, 1, [C])
    hang, thread = hangs(opened[0], tasks.pop())
    journal.kept("doc", 0, 1, [A])
    journal.released(["doc", "other"])
    journal.kept("doc", 0, 1, [B])
    assert journal.num_waiting == 3
    hang.released.set()
    thread.join()
    for task in reversed(tasks):  # threads take turns as they like
        task()
    assert sorted(reopened(path)) == [("doc", 0, 1, [B]), ("first", 0, 1, [C])]


def test_what_is_left_is_written_at_the_end(path: str) -> None:
    journal = GroupJournal(path, lambda task: None)
    journal.kept("doc", 0, 1, [A])
    journal.close()
    assert reopened(path) == [("doc", 0, 1, [A])]


def test_the_end_waits_for_no_write_that_hangs(
    path: str, opened: list[sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segreuse_store.journal._CLOSE_S", 0.01)
    tasks: list[Callable[[], None]] = []
    journal = GroupJournal(path, tasks.append)
    journal.kept("doc", 0, 1, [A])
    hang, thread = hangs(opened[0], tasks.pop())
    journal.close()
    assert thread.is_alive()
    hang.released.set()
    thread.join()
    assert reopened(path) == [("doc", 0, 1, [A])]


def test_a_write_that_fails_is_said_and_done_with_the_next(
    path: str, caplog: pytest.LogCaptureFixture, opened: list[sqlite3.Connection]
) -> None:
    journal = GroupJournal(path, at_once)
    opened[0].execute("PRAGMA query_only = ON")
    with caplog.at_level("WARNING", "vllm.segreuse"):
        journal.kept("doc", 0, 1, [A])
    assert "documents may be computed again" in caplog.text
    opened[0].execute("PRAGMA query_only = OFF")
    journal.kept("next", 0, 1, [A])
    journal.close()
    assert sorted(reopened(path)) == [("doc", 0, 1, [A]), ("next", 0, 1, [A])]


def test_no_more_than_so_many_changes_wait_for_a_file_that_cannot_be_written(
    path: str, opened: list[sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segreuse_store.journal._MOST_CHANGES", 3)
    journal = GroupJournal(path, at_once)
    opened[0].execute("PRAGMA query_only = ON")
    for number in range(10):
        journal.kept(f"doc{number}", 0, 1, [A])
    assert journal.num_waiting <= 3
    journal.close()


def test_a_thousand_changes_that_cannot_be_written_are_given_up(
    path: str, opened: list[sqlite3.Connection]
) -> None:
    journal = GroupJournal(path, at_once)
    opened[0].execute("PRAGMA query_only = ON")
    waiting = []
    for number in range(1001):
        journal.kept(f"doc{number}", 0, 1, [A])
        waiting.append(journal.num_waiting)
    assert waiting == [*range(1, 1000), 0, 1]
    opened[0].execute("PRAGMA query_only = OFF")
    journal.close()
    assert reopened(path) == [("doc1000", 0, 1, [A])]


def test_parts_are_read_up_to_the_most_that_a_group_may_have(path: str) -> None:
    journal = GroupJournal(path, at_once)
    journal.kept("most", 2**20 - 1, 2**20, [A, B])
    journal.kept("more", 0, 2**20 + 1, [A])
    journal.close()
    assert reopened(path) == [("most", 2**20 - 1, 2**20, [A, B])]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR])
def test_a_file_that_cannot_be_read_now_is_not_replaced(
    path: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    journal = GroupJournal(path, at_once)
    journal.kept("doc", 0, 1, [A])
    journal.close()
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code

    def fails(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("segreuse_store.journal.open_private", fails)
        with pytest.raises(OSError, match="disk I/O error"):
            GroupJournal(path, at_once)
    assert reopened(path) == [("doc", 0, 1, [A])]


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_replaced(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    journal = GroupJournal(path, at_once)
    assert journal.at_start() == []
    journal.kept("doc", 0, 1, [A])
    journal.close()
    assert len(reopened(path)) == 1


@pytest.mark.parametrize(
    "row",
    [
        (b"doc", 0, 1, A), ("doc", 1, 1, A), ("doc", -1, 1, A), ("doc", "x", 1, A),
        ("doc", 0, 2**40, A), ("doc", 0, 1, A[:5]), ("doc", 0, 1, b""), ("doc", 0, 1, "text"),
    ],
)  # fmt: skip
def test_a_damaged_row_is_no_part(path: str, row: tuple[object, ...]) -> None:
    journal = GroupJournal(path, at_once)
    journal.kept("sound", 0, 1, [A])
    journal.close()
    with sqlite3.connect(path) as sql:
        sql.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", row)
    sql.close()
    assert reopened(path) == [("sound", 0, 1, [A])]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"missing"):
        GroupJournal(str(tmp_path / "missing" / "documents.sqlite"), at_once)


def test_the_names_of_what_was_released_are_in_no_file(path: str) -> None:
    """They are digests of texts: whoever guesses one could see that it was there."""
    journal = GroupJournal(path, at_once)
    journal.kept("of a deleted document", 0, 1, [A])
    journal.kept("doc", 0, 1, [B])
    files = [Path(path + suffix) for suffix in ("", "-wal")]
    assert any(b"of a deleted document" in file.read_bytes() for file in files)
    journal.released(["of a deleted document"])
    for file in files:
        assert b"of a deleted document" not in file.read_bytes()
        assert A not in file.read_bytes()
    journal.close()
    assert reopened(path) == [("doc", 0, 1, [B])]
