# SPDX-License-Identifier: Apache-2.0
"""The database of a store of files: which records there are, and what is known of them.

A record is there from the moment that its row is committed, and gone from the moment that the
deletion of its row is. With a cipher the row has the only copy of the record's key.

`synchronous` is NORMAL: what was committed last may be lost with the machine's power, but not with
the process. A row that is lost leaves a file that nothing names; a deletion that is lost leaves
a row without a file. Both are removed at the next start.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm_segreuse.tier.format import Kept
from vllm_segreuse.tier.sealing import PROOF_BYTES, CorruptError, Sealer
from vllm_segreuse.tier.sqlite import open_private

# Primary result codes whose cause is not what the file holds.
_OUTSIDE = frozenset(
    (
        *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM),
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL),
        *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH),
    )
)
_TABLE = """
CREATE TABLE IF NOT EXISTS records (
    name TEXT PRIMARY KEY, secret BLOB NOT NULL, about BLOB NOT NULL,
    durable INTEGER NOT NULL, used REAL NOT NULL) WITHOUT ROWID
"""


class DamagedError(RuntimeError):
    """The database cannot be read."""


class Database:
    """Rows of the records. Threads may take turns."""

    def __init__(self, path: str, fingerprint: bytes, sealer: Sealer) -> None:
        """Open the database, or make one.

        Args:
            path: of its file.
            fingerprint: of the model; rows of another one are damaged.
            sealer: of `about`.

        Raises:
            DamagedError: the file is no database, or not ours.
            OSError: it can be neither read nor made.
        """
        self._fingerprint = fingerprint
        self._sealer = sealer
        self._lock = threading.Lock()
        with _damage():
            self._sql = open_private(path, _TABLE, timeout_s=5.0)

    def rows(self) -> Iterator[tuple[str, Kept | None]]:
        """(name, record) from the least to the most recently used; None: the row is damaged.

        Raises:
            DamagedError: what follows cannot be read.
        """
        with _damage(), self._lock:
            columns = "name, secret, about, durable"
            found = self._sql.execute(f"SELECT {columns} FROM records ORDER BY used").fetchall()
        for name, *values in found:
            yield name, self._kept(name, *values)

    def _kept(self, name: object, secret: object, about: object, durable: object) -> Kept | None:
        # SQLite gives whatever type a damaged row says.
        if not (isinstance(secret, bytes) and isinstance(about, bytes)):
            return None
        body, proof = about[:-PROOF_BYTES], about[-PROOF_BYTES:]
        try:
            opened = self._sealer.open(secret, self._context(str(name)), body, proof)
        except CorruptError:
            return None
        return Kept(str(name), secret, bytes(opened), bool(durable))

    def change(
        self,
        leaving: Iterable[str] = (),
        coming: Sequence[Kept] = (),
        used: Mapping[str, float] | None = None,
        durable: Mapping[str, bool] | None = None,
    ) -> None:
        """All of it, or nothing: in one transaction.

        Args:
            leaving: names of records that are no longer there.
            coming: records whose files are on disk.
            used: when records were used, in seconds since the epoch, by name.
            durable: of records that change it, by name.

        Raises:
            OSError: nothing was changed.
        """
        now = time.time()
        rows = [
            # The times keep their order.
            (kept.name, kept.secret, self._sealed(kept), kept.durable, now + 1e-6 * i)
            for i, kept in enumerate(coming)
        ]
        try:
            with self._lock, self._sql as sql:
                sql.executemany("DELETE FROM records WHERE name = ?", [(name,) for name in leaving])
                sql.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
                for column, changes in (("used", used or {}), ("durable", durable or {})):
                    statement = f"UPDATE records SET {column} = ? WHERE name = ?"
                    sql.executemany(statement, [(value, name) for name, value in changes.items()])
        except sqlite3.Error as error:
            raise OSError(f"the database of the store: {error}") from error

    def _sealed(self, kept: Kept) -> bytes:
        body, proof = self._sealer.seal(kept.secret, self._context(kept.name), kept.about)
        return bytes(body) + proof

    def _context(self, name: str) -> bytes:
        return self._fingerprint + name.encode()

    def forget_deleted(self) -> None:
        """Rows that were deleted are on no page of the database and of its journal any more."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Ends all use of it."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._sql.close()


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in _OUTSIDE:
            raise OSError(f"the database of the store: {error}") from error
        raise DamagedError(str(error)) from error
