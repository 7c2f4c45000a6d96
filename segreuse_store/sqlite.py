# SPDX-License-Identifier: Apache-2.0
"""How the databases of a store are opened: for their owner alone, and so that what was deleted is
overwritten; and which of their errors say that a file is damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator

FILES = ("", "-wal", "-shm")
"""Behind the path of a database: its files."""

_FILE = 0o600
# Primary result codes whose cause is not what the file holds.
_OUTSIDE = frozenset(
    (
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_MISUSE,
    )
)
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "secure_delete = ON",
    "temp_store = MEMORY",
)


class DamagedError(OSError):
    """The database cannot be read, and will not be."""


@contextlib.contextmanager
def sqlite_errors(what: str) -> Iterator[None]:
    """SQLite's errors as those of the system.

    Args:
        what: the database is, for the message.

    Raises:
        DamagedError: the file is no database, or not ours.
        OSError: it can be neither read nor written.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
        kind = OSError if code in _OUTSIDE else DamagedError
        raise kind(f"{what}: {error}") from error


def forget_deleted(sql: sqlite3.Connection) -> bool:
    """Rows that were deleted are on no page of the database and of its journal any more; returns
    whether that could be done now.

    Raises:
        sqlite3.Error: it could not, for another reason than that others read it.
    """
    busy: int = sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    return not busy


def open_private(path: str, tables: str, timeout_s: float) -> sqlite3.Connection:
    """A database with tables, all made if need be. Threads may take turns.

    Args:
        path: of its file.
        tables: statements that make the tables unless they are there.
        timeout_s: how long a statement waits for others.

    Raises:
        sqlite3.Error: the file is no database.
        OSError: it can be neither read nor made.
    """
    # Before SQLite, which would make it for all users; its journals get the same mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, _FILE))
    sql = sqlite3.connect(path, timeout=timeout_s, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            sql.execute(f"PRAGMA {pragma}")
        sql.executescript(tables)
    except BaseException:
        sql.close()
        raise
    return sql
