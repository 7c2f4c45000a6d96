# SPDX-License-Identifier: Apache-2.0
"""Which records the owner's groups consist of, in a file beside the records.

A group is what the owner holds or releases as a whole, such as a document of a knowledge base. It
and its records have names, which should be digests: the file holds nothing else. Whether the
records are there is not written here: after a restart the owner looks each up. So what is lost with
the machine's power costs a computation, or a look-up in vain, and nothing wrong is served.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from segreuse_store.sqlite import (
    FILES,
    DamagedError,
    forget_deleted,
    open_private,
    sqlite_errors,
)

logger = logging.getLogger("vllm.segreuse")

KEY_BYTES = 32
_TABLE = """
CREATE TABLE IF NOT EXISTS parts (
    entry TEXT, part INTEGER, parts INTEGER NOT NULL, keys BLOB NOT NULL, PRIMARY KEY (entry, part))
"""
_CLOSE_S = 2.0
_MOST_CHANGES = 1000
"""That wait to be written."""

Submit = Callable[[Callable[[], None]], None]
"""Runs a function in another thread, soon."""


class GroupPart(NamedTuple):
    """A part of a group, and the keys of its records.

    Attributes:
        group: its name.
        part: number of the part, from 0.
        parts: how many the group has.
        keys: 32 bytes each, in their order.
    """

    group: str
    part: int
    parts: int
    keys: list[bytes]


class GroupJournal:
    """Of one engine. Changes are written in their order, in other threads.

    Args:
        path: of the file, made if need be (0600). One that is damaged is replaced by an empty one.
        submit: has what blocks run elsewhere.

    Raises:
        OSError: the file can be neither read nor made.
    """

    def __init__(self, path: str, submit: Submit) -> None:
        self._path = path
        self._submit = submit
        self._changes: deque[GroupPart | tuple[str, ...]] = deque()
        self._lock = threading.Lock()
        try:
            self._sql, self._at_start = _opened(path)
        except DamagedError as error:
            logger.warning("segment reuse: %s: it is damaged, and begins anew", error)
            for suffix in FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path + suffix)
            self._sql, self._at_start = _opened(path)

    def at_start(self) -> list[GroupPart]:
        """What an earlier run has left."""
        return self._at_start

    def kept(self, group: str, part: int, parts: int, keys: Sequence[bytes]) -> None:
        """A part consists of these records."""
        self._changes.append(GroupPart(group, part, parts, [*keys]))
        self._submit(self._write)

    def released(self, groups: Sequence[str]) -> None:
        """Groups are gone."""
        self._changes.append(tuple(groups))
        self._submit(self._write)

    @property
    def num_waiting(self) -> int:
        """Changes that are not written yet."""
        return len(self._changes)

    def close(self) -> None:
        """Write what is left, unless a write hangs, and end all use of the file."""
        if self._lock.acquire(timeout=_CLOSE_S):
            self._lock.release()
            self._write()
            with self._lock:
                self._sql.close()

    def _write(self) -> None:
        with self._lock:
            changes = [self._changes.popleft() for _ in range(len(self._changes))]
            try:
                with self._sql as sql:
                    for change in changes:
                        _carry_out(sql, change)
                if not all(isinstance(change, GroupPart) for change in changes):
                    forget_deleted(self._sql)
            except sqlite3.Error as error:
                if len(changes) < _MOST_CHANGES:
                    self._changes.extendleft(reversed(changes))  # to be written with the next
                logger.warning(
                    "segment reuse: %s: documents may be computed again after a restart: %s",
                    self._path,
                    error,
                )


def _carry_out(sql: sqlite3.Connection, change: GroupPart | tuple[str, ...]) -> None:
    if isinstance(change, GroupPart):
        values = *change[:3], b"".join(change.keys)
        sql.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?)", values)
    else:
        rows = [(entry,) for entry in change]
        sql.executemany("DELETE FROM parts WHERE entry = ?", rows)


def _opened(path: str) -> tuple[sqlite3.Connection, list[GroupPart]]:
    with sqlite_errors(path):
        sql = open_private(path, _TABLE, timeout_s=1.0)
        try:
            return sql, list(_parts(sql))
        except BaseException:
            sql.close()
            raise


def _parts(sql: sqlite3.Connection) -> Iterator[GroupPart]:
    """Rows that can be so; SQLite gives whatever type a damaged row says."""
    for entry, part, parts, keys in sql.execute("SELECT entry, part, parts, keys FROM parts"):
        are_numbers = isinstance(part, int) and isinstance(parts, int)
        are_keys = isinstance(keys, bytes) and keys and len(keys) % KEY_BYTES == 0
        if isinstance(entry, str) and are_numbers and are_keys and 0 <= part < parts <= 2**20:
            split = range(0, len(keys), KEY_BYTES)
            yield GroupPart(entry, part, parts, [keys[i : i + KEY_BYTES] for i in split])
