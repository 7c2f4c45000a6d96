# SPDX-License-Identifier: Apache-2.0
"""How the databases of a store are opened: for their owner alone, and so that what was deleted is
overwritten."""

from __future__ import annotations

import os
import sqlite3

_FILE = 0o600
_PRAGMAS = ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON")


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
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE))
    sql = sqlite3.connect(path, timeout=timeout_s, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            sql.execute(f"PRAGMA {pragma}")
        sql.executescript(tables)
    except BaseException:
        sql.close()
        raise
    return sql
