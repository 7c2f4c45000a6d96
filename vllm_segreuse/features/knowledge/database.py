# SPDX-License-Identifier: Apache-2.0
"""The manifest's file: made, opened, locked, and kept from other users of the machine.

It holds the tokens of documents, so that it is its owner's alone (0600): a new file is made so, and
the permissions of one that exists are narrowed. SQLite gives its journals those of the file.

What was deleted is overwritten in it, whatever SQLite was built to do, and the journal is cut off
behind each change: a locked database would keep it, with all pages as they were before. A file that
was once written without this is written anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator

from vllm_segreuse.features.knowledge.errors import ManifestError
from vllm_segreuse.features.knowledge.rows import text, to_text

logger = logging.getLogger("vllm.segreuse")

IN_MEMORY = ":memory:"
_VERSION = "3"
_READABLE = ("1", "2", _VERSION)
_ERASES = 1  # in the file's header: nothing that was deleted is left in it
_PRIVATE = 0o600
_JOURNALS = ("-journal", "-wal", "-shm")
_PRAGMAS = (*("locking_mode = EXCLUSIVE", "synchronous = FULL", "temp_store = MEMORY"),)

_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS bases (
    name TEXT PRIMARY KEY, extra_key TEXT NOT NULL, preamble TEXT, metadata TEXT NOT NULL,
    created_at REAL NOT NULL, context TEXT NOT NULL DEFAULT 'none',
    digest BLOB NOT NULL DEFAULT x'');
CREATE TABLE IF NOT EXISTS documents (
    base TEXT NOT NULL, id TEXT NOT NULL, entry TEXT NOT NULL, context BLOB NOT NULL,
    tokens BLOB NOT NULL, metadata TEXT NOT NULL, digest BLOB NOT NULL,
    compression TEXT NOT NULL DEFAULT '', kept BLOB, PRIMARY KEY (base, id));
CREATE INDEX IF NOT EXISTS documents_of_entry ON documents (entry);
CREATE TABLE IF NOT EXISTS uses (entry TEXT PRIMARY KEY, hits INTEGER NOT NULL, last_used REAL);
CREATE TABLE IF NOT EXISTS deleted (base TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY (base, id));
"""


def connect(path: str) -> sqlite3.Connection:
    """The manifest's database, with its tables, locked against other processes.

    Args:
        path: the file, made if need be; `IN_MEMORY` for one that is forgotten.

    Raises:
        ManifestError: the file is no manifest, another process uses it, or it cannot be written.
    """
    with usable(path):
        file = None if path == IN_MEMORY else os.path.realpath(path)
        if file is not None:
            _create(file)
        # Several threads may take turns.
        sql = sqlite3.connect(file or path, timeout=1.0, check_same_thread=False)
        try:
            _prepare(sql, file)
        except BaseException:
            sql.close()
            raise
    return sql


@contextlib.contextmanager
def usable(path: str) -> Iterator[None]:
    """Makes a `ManifestError` of whatever is wrong with the file."""
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ManifestError(
            f"cannot use {path!r} as the manifest of knowledge bases: {reason}; if no other "
            "server uses it, restore it or move it away to begin with an empty one"
        ) from None


def _create(file: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE))
    # No descriptor of a file that exists: closing it would give up the locks that SQLite has on it.
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise ValueError("it is no regular file")


def overwrites_deleted(sql: sqlite3.Connection) -> None:
    """What is deleted from now on is overwritten, whatever the connection was told before."""
    sql.execute("PRAGMA secure_delete = ON")


def _prepare(sql: sqlite3.Connection, file: str | None) -> None:
    for pragma in _PRAGMAS:
        sql.execute(f"PRAGMA {pragma}")
    overwrites_deleted(sql)
    sql.execute("BEGIN EXCLUSIVE")
    tables = {name for (name,) in sql.execute("SELECT name FROM sqlite_master")}
    if tables and "about" not in tables:
        raise ValueError("it is a database of something else")
    if file is not None:
        _narrow(file)  # before anything is written
    sql.commit()  # the file stays locked
    sql.execute("PRAGMA journal_mode = TRUNCATE")
    sql.execute("BEGIN EXCLUSIVE")
    for statement in _TABLES.split(";"):
        sql.execute(statement)
    sql.execute("INSERT OR IGNORE INTO about VALUES ('version', ?)", (_VERSION,))
    rows = sql.execute(f"SELECT {text('value')} FROM about WHERE name = 'version'")
    version = to_text(rows.fetchone()[0])
    if version.isdecimal() and version not in _READABLE:
        raise ValueError(f"it is a manifest of version {version}, not {_VERSION}")
    # Anything else is damaged. Each row tells by itself whether it is sound.
    sql.execute("UPDATE about SET value = ? WHERE name = 'version'", (_VERSION,))
    _migrate(sql)
    # What was counted of a document whose deletion a crash has cut short.
    sql.execute("DELETE FROM uses WHERE entry NOT IN (SELECT entry FROM documents)")
    sql.commit()
    _erase_what_was_left(sql)


def _erase_what_was_left(sql: sqlite3.Connection) -> None:
    """Earlier versions did not overwrite what was deleted, unless SQLite did by itself."""
    if sql.execute("PRAGMA user_version").fetchone()[0] >= _ERASES:
        return
    try:
        sql.execute("VACUUM")
    except sqlite3.Error as error:
        logger.warning(
            "segment reuse: knowledge bases: text that was deleted by an earlier version may still "
            "be in the manifest's file: it could not be written anew: %s; the next start tries it "
            "again",
            error,
        )
        return
    sql.execute(f"PRAGMA user_version = {_ERASES}")


def _narrow(file: str) -> None:
    for path in (file, *(file + suffix for suffix in _JOURNALS)):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_IMODE(os.stat(path).st_mode) & ~_PRIVATE:
                os.chmod(path, _PRIVATE)
                logger.warning("segment reuse: %s was open to others: its mode is 0600 now", path)


def _migrate(sql: sqlite3.Connection) -> None:
    """Version 1 had no contexts: documents were computed alone, and stay so. Versions 1 and 2 had
    no compressed documents.

    The table says which version it is, since the version's own row may be damaged.
    """
    columns = {column for _, column, *_ in sql.execute("PRAGMA table_info(bases)")}
    if "context" not in columns:
        sql.execute("ALTER TABLE bases ADD COLUMN context TEXT NOT NULL DEFAULT 'none'")
        sql.execute("ALTER TABLE bases ADD COLUMN digest BLOB NOT NULL DEFAULT x''")
    columns = {column for _, column, *_ in sql.execute("PRAGMA table_info(documents)")}
    if "compression" not in columns:
        sql.execute("ALTER TABLE documents ADD COLUMN compression TEXT NOT NULL DEFAULT ''")
        sql.execute("ALTER TABLE documents ADD COLUMN kept BLOB")
