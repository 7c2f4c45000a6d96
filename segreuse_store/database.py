# SPDX-License-Identifier: Apache-2.0
"""The database of a store of files: which records there are, and what is known of them.

Engines share it. A row is there from before its file is made until after its file was removed, and
stands for a place in the budget of all of them:

    reserve ──► WRITING ── publish ──► THERE ── take away ──► LEAVING ── settle ──► no row
                   └───────────────────── its file cannot be written ─────┘

Nobody reads a record that is not THERE. A row that is not belongs to the engine that changes it; if
that one dies, any other ends what it has begun (`RecordFolder.clean`). A row that is LEAVING has
lost its secret, its text and its key, so that another record may have that key at once.

`synchronous` is NORMAL: what was committed last may be lost with the machine's power, but not with
a process. Whatever is inconsistent then is removed by the next engine that opens the store alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from segreuse_store.format import DIGEST_BYTES, KEY_BYTES, StoredRecord
from segreuse_store.sealing import PROOF_BYTES, CorruptError, Sealer
from segreuse_store.sqlite import forget_deleted, open_private, sqlite_errors

_errors = functools.partial(sqlite_errors, "the database of the store")
_WRITING, _THERE, _LEAVING = range(3)
_ERASED, _GONE, _CAME = -1, 0, 1  # of the table `changes`
_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    name TEXT PRIMARY KEY, digest BLOB UNIQUE, secret BLOB NOT NULL, about BLOB NOT NULL,
    state INTEGER NOT NULL, durable INTEGER NOT NULL, used REAL NOT NULL, engine TEXT NOT NULL,
    in_place INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON records (state, durable, used);
CREATE TABLE IF NOT EXISTS holders (
    digest BLOB, engine TEXT, PRIMARY KEY (digest, engine)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, there INTEGER NOT NULL);
"""
_COLUMNS = "name, secret, about, durable, engine"
_MOST_CHANGES = 100_000
_APART_S = 60.0
"""Clocks of machines that share a store may differ by so much."""
NOBODY = ""
"""The engine of a row whose file could not be removed: whoever can removes it."""


class _Place(NamedTuple):
    """A place of the budget.

    Attributes:
        name: of the file that has it.
        is_record: whether that is a record.
    """

    name: str
    is_record: bool


_FREE = _Place("", False)


class Reserved(NamedTuple):
    """What `Database.reserve` has found.

    Attributes:
        granted: rows that were made.
        victims: names of files that must be removed before any of these is made.
        removed: those of them that were records until now.
        there: records with the key of one that was to come.
        full: how many have found no place.
    """

    granted: list[StoredRecord]
    victims: list[str]
    removed: list[str]
    there: list[StoredRecord]
    full: int


class Notes(NamedTuple):
    """What becomes known of records.

    Attributes:
        used: when they were used, in seconds since the epoch, by name.
        durable: whether this engine holds them, by key.
    """

    used: Mapping[str, float]
    durable: Mapping[bytes, bool]


_NOTHING = Notes({}, {})


class RecordChanges(NamedTuple):
    """What others have changed; `gone` first.

    Attributes:
        gone: names of records.
        coming: records.
        erased: names of those that have gone because nobody holds them any more.
        all: names of all records, if what has gone is no longer known by name.
    """

    gone: list[str]
    coming: list[StoredRecord]
    all: frozenset[str] | None = None
    erased: frozenset[str] = frozenset()


class Database:
    """Rows of the records. Threads may take turns, and so may processes.

    Attributes:
        used: places of the budget that were taken when it was last asked.
    """

    def __init__(
        self, path: str, fingerprint: bytes, sealer: Sealer, digest_key: bytes, engine: str
    ) -> None:
        """Open the database, or make one.

        Args:
            path: of its file.
            fingerprint: of the model; rows of another one are damaged.
            sealer: of `about`.
            digest_key: of the digests that stand for keys.
            engine: name of the one that opens it, which no other has.

        Raises:
            DamagedError: the file is no database, or not ours.
            OSError: it can be neither read nor made.
        """
        self._fingerprint = fingerprint
        self._sealer = sealer
        self._digest_key = digest_key
        self._engine = engine
        self._lock = threading.Lock()
        with _errors():
            self._sql = open_private(path, _TABLES, timeout_s=5.0)
            self._sql.isolation_level = None  # transactions begin and end where it says so
        self._notes: queue.SimpleQueue[Notes] = queue.SimpleQueue()
        self._unwritten = _NOTHING
        self._seen = 0
        self.used = 0

    def key_digest(self, key: bytes) -> bytes:
        """What stands for a record's key."""
        return hashlib.blake2b(key, digest_size=DIGEST_BYTES, key=self._digest_key).digest()

    def rows(self) -> list[tuple[str, StoredRecord | None]]:
        """(name, record) from the least to the most recently used; None: the row is damaged.
        `changes` begins behind it.

        Raises:
            DamagedError: they cannot be read.
        """
        with _errors(), self._lock:
            return self._all_rows()

    def correct_times(self) -> None:
        """Records that were used in the future, by a clock that was ahead, were used now. What is
        new would be the least recently used otherwise, and make room for them.

        Raises:
            DamagedError: the rows cannot be read.
            OSError: nothing was changed.
        """
        with _errors(), self._lock:
            query = "UPDATE records SET used = :now WHERE used > :now"
            self._sql.execute(query, {"now": time.time()})

    def _correct_far_times(self, sql: sqlite3.Connection) -> None:
        """The same while engines run: a clock that was ahead has been set. Both statements are
        looked up by the index."""
        query = "UPDATE records SET used = ? WHERE state = ? AND durable = ? AND used > ?"
        now_s = time.time()
        for durable in (False, True):
            sql.execute(query, (now_s, _THERE, durable, now_s + _APART_S))

    def _all_rows(self) -> list[tuple[str, StoredRecord | None]]:
        with self._transaction("DEFERRED") as sql:
            seen = self._last_change(sql)
            self._count(sql)
            query = f"SELECT {_COLUMNS} FROM records WHERE state = ? ORDER BY used"
            found = sql.execute(query, (_THERE,)).fetchall()
        rows = [(name, self._record(name, *values)) for name, *values in found]
        self._seen = seen  # not before all is read: what fails is asked again
        return rows

    def _record(
        self, name: object, secret: object, about: object, durable: object, engine: object
    ) -> StoredRecord | None:
        # SQLite gives whatever type a damaged row says.
        if not (isinstance(secret, bytes) and isinstance(about, bytes)):
            return None
        body, proof = about[:-PROOF_BYTES], about[-PROOF_BYTES:]
        try:
            opened = self._sealer.open(secret, self._context(str(name)), body, proof)
        except CorruptError:
            return None
        known = bytes(opened)
        return StoredRecord(
            key=known[:KEY_BYTES],
            about=known[KEY_BYTES:],
            durable=bool(durable),
            name=str(name),
            secret=secret,
            mine=engine == self._engine,
        )

    # From nothing to a record.

    def reserve(
        self, coming: Sequence[StoredRecord], slots: int, expired: Callable[[set[str]], set[str]]
    ) -> Reserved:
        """Rows for records whose files are to be made, as far as the budget allows.

        A record makes room for others if it is the least recently used. Durable ones do for
        durable ones only, and only if no other running engine holds them.

        Args:
            coming: new ones.
            slots: most files that all engines together may have.
            expired: which of the engines with these names do not run.

        Raises:
            OSError: nothing was changed.
        """
        with self._lock, _errors(), self._with_notes() as sql:
            there, new = self._new(sql, coming)
            places = [_FREE] * min(len(new), max(0, slots - self._count(sql)))
            if len(places) < len(new):
                self._correct_far_times(sql)
            places += self._victims(sql, len(new) - len(places))
            unheld: list[_Place] = []
            if len(places) < len(new) and any(record.durable for record, _ in new):
                unheld = self._unheld(sql, len(new), expired)
            granted: list[StoredRecord] = []
            victims: list[_Place] = []
            for record, digest in new:
                more = unheld if record.durable else []
                if not (left := places or more):
                    continue
                victims.append(left.pop(0))
                granted.append(record)
                self._insert(sql, record, digest, victims[-1] is not _FREE, len(granted))
            names = [place.name for place in victims if place is not _FREE]
            removed = [place.name for place in victims if place.is_record]
            self._take_away(sql, names, removed)
            self._count(sql)
        return Reserved(granted, names, removed, there, len(new) - len(granted))

    def _new(
        self, sql: sqlite3.Connection, coming: Sequence[StoredRecord]
    ) -> tuple[list[StoredRecord], list[tuple[StoredRecord, bytes]]]:
        """Records that are there already, and those that nobody writes, with their digests."""
        there, new = [], []
        for record in coming:
            digest = self.key_digest(record.key)
            if record.durable:
                self._hold(sql, digest)
            found = sql.execute(
                f"SELECT state, {_COLUMNS} FROM records WHERE digest = ?", (digest,)
            ).fetchone()
            if found is None:
                holders = "SELECT count(*) FROM holders WHERE digest = ?"
                is_held = sql.execute(holders, (digest,)).fetchone()[0] > 0
                new.append((record._replace(durable=is_held), digest))
            elif found[0] == _THERE and (known := self._record(*found[1:])) is not None:
                there.append(known)
        return there, new

    def _victims(self, sql: sqlite3.Connection, most: int) -> list[_Place]:
        """Files that could not be removed, then the least recently
        used records that are not durable."""
        if most <= 0:
            return []
        query = "SELECT name FROM records WHERE state = ? AND engine = ? LIMIT ?"
        left = sql.execute(query, (_LEAVING, NOBODY, most)).fetchall()
        query = "SELECT name FROM records WHERE state = ? AND NOT durable ORDER BY used LIMIT ?"
        oldest = sql.execute(query, (_THERE, most - len(left))).fetchall()
        return [
            *(_Place(name, False) for (name,) in left),
            *(_Place(name, True) for (name,) in oldest),
        ]

    def _unheld(
        self, sql: sqlite3.Connection, most: int, expired: Callable[[set[str]], set[str]]
    ) -> list[_Place]:
        """Durable records that no other running engine holds, the least recently used first."""
        query = "SELECT DISTINCT engine FROM holders WHERE engine <> ?"
        others = {engine for (engine,) in sql.execute(query, (self._engine,))}
        running = sorted(others - expired(others))
        marks = ", ".join("?" * len(running))
        query = (
            "SELECT name FROM records WHERE state = ? AND durable AND digest NOT IN "
            f"(SELECT digest FROM holders WHERE engine IN ({marks})) ORDER BY used LIMIT ?"
        )
        return [_Place(name, True) for (name,) in sql.execute(query, (_THERE, *running, most))]

    def _insert(
        self,
        sql: sqlite3.Connection,
        record: StoredRecord,
        digest: bytes,
        in_place: bool,
        number: int,
    ) -> None:
        values = (
            record.name,
            digest,
            record.secret,
            self._sealed(record),
            _WRITING,
            record.durable,
            time.time() + 1e-6 * number,  # the times keep their order
            self._engine,
            in_place,
        )
        sql.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def publish(
        self, written: Sequence[StoredRecord], victims: Sequence[str]
    ) -> list[StoredRecord]:
        """The files of reserved rows are on the device, and those of the victims are not.

        Returns:
            Those that were erased meanwhile; their files must be removed, and then `settle`d.

        Raises:
            OSError: nothing was changed.
        """
        erased: list[StoredRecord] = []
        with self._lock, _errors(), self._transaction() as sql:
            for record in written:
                name = (record.name,)
                sql.execute("UPDATE records SET in_place = 0 WHERE name = ?", name)
                query = "UPDATE records SET state = ? WHERE name = ? AND state = ?"
                if sql.execute(query, (_THERE, *name, _WRITING)).rowcount:
                    _note(sql, name, _CAME)
                else:
                    erased.append(record)
            sql.executemany("DELETE FROM records WHERE name = ?", [(name,) for name in victims])
            old = (self._last_change(sql) - _MOST_CHANGES,)
            sql.execute("DELETE FROM changes WHERE number <= ?", old)
            self._count(sql)
        return erased

    # From a record to nothing.

    def leave(self, names: Collection[str]) -> None:
        """Records are no longer there; their files, which are, are this engine's to remove.

        Raises:
            OSError: nothing was changed.
        """
        with self._lock, _errors(), self._transaction() as sql:
            query = "SELECT name FROM records WHERE name = ? AND state = ?"
            found = [name for name in names if sql.execute(query, (name, _THERE)).fetchone()]
            self._take_away(sql, found, found)

    def _take_away(
        self,
        sql: sqlite3.Connection,
        names: Collection[str],
        there: Collection[str],
        change: int = _GONE,
    ) -> None:
        sql.executemany(
            "UPDATE records SET state = ?, engine = ?, digest = NULL, secret = x'', about = x'' "
            "WHERE name = ?",
            [(_LEAVING, self._engine, name) for name in names],
        )
        _note(sql, there, change)

    def settle(
        self, gone: Collection[str], stuck: Collection[str] = (), engine: str | None = None
    ) -> None:
        """Ends what an engine has begun.

        Args:
            gone: names without a file.
            stuck: names whose files cannot be removed.
            engine: whose they are; None: this one's.

        Raises:
            OSError: nothing was changed.
        """
        engine = self._engine if engine is None else engine
        whose = "WHERE name = ? AND engine = ? AND state <> ?"
        with self._lock, _errors(), self._transaction() as sql:
            sql.executemany(
                f"DELETE FROM records {whose}", [(name, engine, _THERE) for name in gone]
            )
            sql.executemany(
                f"UPDATE records SET state = ?, engine = ?, in_place = 0, digest = NULL, "
                f"secret = x'', about = x'' {whose}",
                [(_LEAVING, NOBODY, name, engine, _THERE) for name in stuck],
            )
            self._count(sql)

    def release(self, keys: Iterable[bytes]) -> list[str]:
        """This engine holds records no longer. Those that nobody holds are taken away.

        Returns:
            Names of files that are this engine's to remove.

        Raises:
            OSError: nothing was changed.
        """
        leaving: list[str] = []
        # Notes first: what was to be held before must not be held again after this.
        with self._lock, _errors(), self._with_notes() as sql:
            for digest in map(self.key_digest, keys):
                if self._release(sql, digest):
                    continue
                query = "SELECT name FROM records WHERE digest = ? AND state = ?"
                leaving += [name for (name,) in sql.execute(query, (digest, _THERE))]
                # Who writes it finds that it was erased.
                sql.execute(
                    "UPDATE records SET state = ?, digest = NULL, secret = x'', about = x'' "
                    "WHERE digest = ? AND state = ?",
                    (_LEAVING, digest, _WRITING),
                )
            self._take_away(sql, leaving, leaving, _ERASED)
        return leaving

    def excess(self, slots: int) -> list[str]:
        """Takes away what is above the budget; returns names of files to remove."""
        with self._lock, _errors(), self._transaction() as sql:
            query = "SELECT name FROM records WHERE state = ? ORDER BY durable > 0, used LIMIT ?"
            most = max(0, self._count(sql) - slots)
            leaving = [name for (name,) in sql.execute(query, (_THERE, most))]
            self._take_away(sql, leaving, leaving)
        return leaving

    def unsettled(self) -> dict[str, list[str]]:
        """Names of rows that are not THERE, by the engine that they belong to."""
        found: dict[str, list[str]] = {}
        with self._lock, _errors():
            query = "SELECT engine, name FROM records WHERE state <> ?"
            for engine, name in self._sql.execute(query, (_THERE,)).fetchall():
                found.setdefault(engine, []).append(name)
        return found

    def forget_deleted(self) -> bool:
        """Rows that were deleted are on no page of the database and of its journal any more;
        returns whether that could be done now."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            return forget_deleted(self._sql)
        return False

    # What is known of records.

    def remember(self, notes: Notes) -> None:
        """To be written with the next `note`, `reserve` or `release`. Waits for nothing."""
        self._notes.put(notes)

    def note(self) -> None:
        """Writes down what is to be remembered.

        Raises:
            OSError: it was not; it will be with the next.
        """
        with self._lock, _errors(), self._with_notes():
            pass

    @contextlib.contextmanager
    def _with_notes(self) -> Iterator[sqlite3.Connection]:
        """A transaction that begins with the notes. If it fails, the next one has them, too."""
        while not self._notes.empty():
            used, durable = self._notes.get()
            before = self._unwritten
            self._unwritten = Notes({**before.used, **used}, {**before.durable, **durable})
        with self._transaction() as sql:
            sql.executemany(
                "UPDATE records SET used = max(used, ?) WHERE name = ?",
                [(when, name) for name, when in self._unwritten.used.items()],
            )
            for key, is_durable in self._unwritten.durable.items():
                (self._hold if is_durable else self._release)(sql, self.key_digest(key))
            yield sql
        self._unwritten = _NOTHING

    def _hold(self, sql: sqlite3.Connection, digest: bytes) -> None:
        sql.execute("INSERT OR IGNORE INTO holders VALUES (?, ?)", (digest, self._engine))
        sql.execute("UPDATE records SET durable = 1 WHERE digest = ?", (digest,))

    def _release(self, sql: sqlite3.Connection, digest: bytes) -> bool:
        """Returns whether another engine holds it."""
        row = (digest, self._engine)
        sql.execute("DELETE FROM holders WHERE digest = ? AND engine = ?", row)
        query = "SELECT count(*) FROM holders WHERE digest = ?"
        is_held: bool = sql.execute(query, (digest,)).fetchone()[0] > 0
        sql.execute("UPDATE records SET durable = ? WHERE digest = ?", (is_held, digest))
        return is_held

    def release_all(self, engine: str) -> None:
        """An engine that will not come again holds nothing."""
        with self._lock, _errors(), self._transaction() as sql:
            sql.execute("DELETE FROM holders WHERE engine = ?", (engine,))
            sql.execute(
                "UPDATE records SET durable = 0 WHERE durable AND digest NOT IN "
                "(SELECT digest FROM holders)"
            )

    def changes(self) -> RecordChanges:
        """What other engines have changed since the last call.

        Raises:
            OSError: it cannot be read; ask again.
        """
        with self._lock, _errors():
            query = "SELECT number, name, there FROM changes WHERE number > ? ORDER BY number"
            found = self._sql.execute(query, (self._seen,)).fetchall()
            if not found:
                return RecordChanges([], [])
            if found[0][0] > self._seen + 1:
                rows = self._all_rows()
                others = [record for _, record in rows if record is not None and not record.mine]
                return RecordChanges([], others, frozenset(name for name, _ in rows))
            gone = [name for _, name, change in found if change != _CAME]
            erased = frozenset(name for _, name, change in found if change == _ERASED)
            coming = {name for _, name, _ in found} - {*gone}
            query = f"SELECT {_COLUMNS} FROM records WHERE name = ? AND state = ?"
            found_rows = [self._sql.execute(query, (name, _THERE)).fetchone() for name in coming]
            record = [self._record(*row) for row in found_rows if row is not None]
            self._count(self._sql)
            self._seen = found[-1][0]  # not before all is read: what fails is asked again
        coming_in = [row for row in record if row is not None and not row.mine]
        return RecordChanges(gone, coming_in, erased=erased)

    # All of it.

    def close(self) -> None:
        """Ends all use of it."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._sql.close()

    def _sealed(self, record: StoredRecord) -> bytes:
        known = record.key + record.about
        body, proof = self._sealer.seal(record.secret, self._context(record.name), known)
        return bytes(body) + proof

    def _context(self, name: str) -> bytes:
        return self._fingerprint + name.encode()

    def _count(self, sql: sqlite3.Connection) -> int:
        """Places that are taken. A row that is written in the place of another has none of its
        own: that one's file is removed before."""
        (rows,) = sql.execute("SELECT count(*) FROM records").fetchone()
        query = "SELECT count(*) FROM records WHERE state IN (?, ?) AND in_place"
        (in_place,) = sql.execute(query, (_WRITING, _LEAVING)).fetchone()
        self.used = rows - in_place
        return self.used

    def _last_change(self, sql: sqlite3.Connection) -> int:
        last: int = sql.execute("SELECT coalesce(max(number), 0) FROM changes").fetchone()[0]
        return last

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """All that is done in it, or nothing. It waits for others before it reads anything."""
        self._sql.execute(f"BEGIN {kind}")
        try:
            yield self._sql
            self._sql.execute("COMMIT")
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise


def _note(sql: sqlite3.Connection, names: Iterable[str], change: int) -> None:
    """Tell other engines what has become of records."""
    sql.executemany(
        "INSERT INTO changes (name, there) VALUES (?, ?)", [(name, change) for name in names]
    )
