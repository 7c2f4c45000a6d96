# SPDX-License-Identifier: Apache-2.0
"""A store of files: one file per record, and a database that names them. Engines share it.

    STORE/records.sqlite    which records there are (`database.py`)
    STORE/digests.key       key of the digests of labels, which may be secret, and of keys
    STORE/files/XX/NAME     a record (`format.py`)
    STORE/engines, ...      which engines use it (`leases.py`)

A row is made first, then the file, of a name that no file had; it is synced, and its folder; then
the row says that the record is there. A removal goes the other way. So every file has a row, which
counts for the budget of all engines, and which a crash leaves for another engine to end. Whatever
of this the machine's power has undone is removed by the next engine that opens the store alone. A
file is never renamed and never written again: the row is what makes it a record. So a file that
another engine removes meanwhile is a miss, and never another record.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from segreuse_store.database import NOBODY, Database, Notes, RecordChanges, Reserved
from segreuse_store.disk import Disk
from segreuse_store.format import (
    DIGEST_BYTES,
    TRAILER_BYTES,
    Sealed,
    StoredRecord,
    record_bytes,
)
from segreuse_store.leases import Leases, Owner
from segreuse_store.sealing import Checksum, CorruptError, Sealer
from segreuse_store.sqlite import FILES, DamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("vllm.segreuse")

FOLDERS = 256
"""Folders that the files of a store are spread over."""

_KEY_BYTES = 32
_OURS = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}")
_DATABASE = "records.sqlite"


class LostError(LookupError):
    """A record cannot be had any more.

    Attributes:
        reason: `missing`, `torn` or `corrupt`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Written(NamedTuple):
    """What became of records that were to be stored.

    Attributes:
        stored: those that are there now.
        removed: names of those that have made room.
        there: records with equal keys that were there before.
        full: how many have found no room.
    """

    stored: list[StoredRecord]
    removed: list[str]
    there: list[StoredRecord]
    full: int


class RecordFolder:
    """The records of one model. Reads and writes may run in any thread.

    Attributes:
        path: of the store.
        record_bytes: of the device that a record takes.
        at_start: records that were there, from the least to the most recently used.
    """

    def __init__(
        self,
        path: str,
        fingerprint: bytes,
        payload_bytes: int,
        sealer: Sealer | None = None,
        disk: Disk | None = None,
        kind: int = 0,
        owner: Owner | None = None,
    ) -> None:
        """Open the store below the path, which other engines may use, or make one.

        Stores of other models, and of other keys, lie in folders of their own and stay as they are.

        Args:
            path: folder of all stores.
            fingerprint: of the model [32 bytes].
            payload_bytes: bytes of a row of host memory.
            sealer: what protects the records; by default a checksum.
            disk: the system calls.
            kind: of the payloads, 0 to 255; the fingerprint is of it, too.
            owner: the engine that opens it.

        Raises:
            OSError: the folder cannot be written, or is damaged while others use it.
        """
        self.disk = disk or Disk()
        self._sealer = sealer or Checksum()
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        self._unsettled: dict[str, bool] = {}
        self._must_forget = False
        self.record_bytes = record_bytes(payload_bytes)
        identity = hashlib.blake2b(fingerprint + self._sealer.identity, digest_size=16)
        self.path = os.path.join(path, identity.hexdigest())
        self._files = os.path.join(self.path, "files")
        self._leases = Leases(self.path, owner or Owner(), self.disk)
        with self._leases.opening():
            for number in range(FOLDERS):
                self.disk.make_folder(os.path.join(self._files, f"{number:02x}"))
            self.disk.sync_folder(self._files)
            self._sealed = Sealed(fingerprint, self._digest_key(), self._sealer, kind)
            self._open()

    @property
    def slots_used(self) -> int:
        """Files that all engines have, or make room for, as was known last."""
        return self._database.used

    @property
    def journal(self) -> str:
        """Path of the engine's journal, which no other engine uses."""
        return self._leases.journal()

    # Opening.

    def _digest_key(self) -> bytes:
        if self._sealer.digest_key is not None:
            return self._sealer.digest_key
        path = os.path.join(self.path, "digests.key")
        into = memoryview(bytearray(_KEY_BYTES))
        with contextlib.suppress(FileNotFoundError):
            if self.disk.read(path, into) == len(into):
                return bytes(into)
        # Without it nothing that is there can be found or read.
        self._remove_database("digests.key is missing or torn")
        self.disk.remove(path)
        self.disk.write(path, [key := secrets.token_bytes(_KEY_BYTES)])
        return key

    def _remove_database(self, why: str) -> None:
        if not self._leases.alone:
            raise OSError(f"{why}, and other engines use the store: stop them all, then start")
        for suffix in FILES:
            self.disk.remove(os.path.join(self.path, _DATABASE + suffix))

    def _open(self) -> None:
        path = os.path.join(self.path, _DATABASE)
        try:
            self._begin(path)
        except DamagedError as error:
            self._remove_database(f"{path} is damaged ({error})")
            logger.warning("segment reuse: %s (%s): begins with an empty store", path, error)
            self._begin(path)

    def _begin(self, path: str) -> None:
        digest_key, engine = self._sealed.digest_key, self._leases.name
        self._database = Database(path, self._fingerprint, self._sealer, digest_key, engine)
        try:
            self._database.correct_times()
            rows = self._database.rows()
            self._end_all([self._leases.name])
            self._leases.remove_expired(self._database.release_all)
            self.at_start = self._checked(rows)
        except BaseException:
            self._database.close()
            raise

    def _checked(self, rows: list[tuple[str, StoredRecord | None]]) -> list[StoredRecord]:
        """The records; without rows that are damaged and, if no other engine uses the store, what
        crashes and losses of power have left."""
        sound = [row for _, row in rows if row]
        garbage: list[str] = []
        if self._leases.alone:
            self._end_all(self._database.unsettled())
            sizes = dict(self.disk.sizes(self._files))
            size = self._payload_bytes + TRAILER_BYTES
            sound = [row for row in sound if sizes.get(row.name) == size]
            names = {row.name for row in sound}
            garbage = [name for name in sizes if name not in names and _OURS.fullmatch(name)]
        lost = {name for name, _ in rows} - {row.name for row in sound}
        self.remove(lost)
        for name in garbage:
            self.disk.remove(self._path(name))
        if lost or garbage:
            logger.info(
                "segment reuse: removed %d records and %d files from %s that a crash or damage "
                "has left",
                len(lost),
                len(garbage),
                self.path,
            )
        return sound

    def trim(self, slots: int) -> None:
        """Removes what is above a budget, which was larger before; not while others use the store.

        Raises:
            OSError: it could not be removed.
        """
        if self._leases.alone:
            names = self._database.excess(slots)
            if stuck := self._end(names):
                raise stuck
            self.at_start = [record for record in self.at_start if record.name not in names]

    # Records.

    def digest(self, label: bytes) -> bytes:
        """What stands for a label on disk [16 bytes]."""
        keyed = hashlib.blake2b(label, digest_size=DIGEST_BYTES, key=self._sealed.digest_key)
        return keyed.digest()

    def new(self, record: StoredRecord) -> StoredRecord:
        """The record with a name and a secret, for `write`."""
        number = secrets.randbits(128)
        name = f"{number % FOLDERS:02x}/{number:032x}"
        return record._replace(name=name, secret=self._sealer.new_secret())

    def _path(self, name: str) -> str:
        return os.path.join(self._files, name)

    def write(self, records: Sequence[tuple[StoredRecord, Buffer]], slots: int) -> Written:
        """Stores records that no engine has stored yet, and returns once they are on the device.

        Args:
            records: new ones, and their payloads, which must not change meanwhile.
            slots: most files that there may be.

        Raises:
            Exception: none of them is stored.
        """
        payloads = {record.name: payload for record, payload in records}
        reserved = self._database.reserve(
            [record for record, _ in records], slots, self._leases.expired
        )
        made: list[str] = []
        try:
            for name in reserved.victims:
                self.disk.remove(self._path(name))
            for record in reserved.granted:
                made.append(record.name)
                self.disk.write(
                    self._path(record.name), self._sealed.file(record, payloads[record.name])
                )
            for folder in {os.path.dirname(name) for name in made}:
                self.disk.sync_folder(os.path.join(self._files, folder))
            erased = self._database.publish(reserved.granted, reserved.victims)
        except BaseException:
            self._give_up(reserved, made)
            raise
        self._end([record.name for record in erased])
        stored = [record for record in reserved.granted if record not in erased]
        return Written(stored, reserved.removed, reserved.there, reserved.full)

    def _give_up(self, reserved: Reserved, made: Collection[str]) -> None:
        """What cannot be removed keeps its place; what was never made has none."""
        unmade = [record.name for record in reserved.granted if record.name not in made]
        self._end([*reserved.victims, *made], unmade)

    def _end(
        self, names: Iterable[str], without_files: Sequence[str] = (), engine: str | None = None
    ) -> Exception | None:
        """Removes files, and then their rows; returns why some could not be removed."""
        gone, stuck, reason = [*without_files], [], None
        for name in names:
            try:
                self.disk.remove(self._path(name))
                gone.append(name)
            except Exception as error:
                stuck.append(name)
                reason = error
        try:
            self._database.settle(gone, stuck, engine)
        except Exception as error:
            reason = error
            if engine is None:
                # Taken up again by `clean`.
                self._unsettled |= dict.fromkeys([*gone, *stuck], True)
        return reason

    def _end_all(self, engines: Iterable[str]) -> None:
        """Ends what these engines have begun; they are dead, or NOBODY."""
        unsettled = self._database.unsettled()
        for engine in engines:
            if engine in unsettled:
                self._end(unsettled[engine], engine=engine)

    def read(self, record: StoredRecord) -> Buffer:
        """The payload of a record, verified.

        Raises:
            LostError: it is missing or damaged.
            OSError: it could not be read.
        """
        size = self._payload_bytes + TRAILER_BYTES
        content = memoryview(bytearray(size + 1))  # one more: a file that is too long is another
        try:
            found = self.disk.read(self._path(record.name), content)
        except FileNotFoundError:
            raise LostError("missing") from None
        if found != size:
            raise LostError("torn")
        try:
            return self._sealed.payload(record, content[:size])
        except CorruptError:
            raise LostError("corrupt") from None

    def remove(self, names: Collection[str]) -> None:
        """Removes records, for all engines. A file that cannot be removed keeps its place in the
        budget, and is the first to make room.

        Raises:
            OSError: nothing was done.
        """
        if names:
            self._database.leave(names)
            self._end(names)

    def set_aside(self, names: Collection[str]) -> None:
        """Records that cannot be read are there no more; their files keep their places, and are
        the first to make room.

        Raises:
            OSError: nothing was done.
        """
        if names:
            self._database.leave(names)
            self._database.settle((), names)

    def release(self, keys: Collection[bytes]) -> list[str]:
        """This engine holds records no longer. Those that no engine holds are removed, and nothing
        opens their files again.

        Returns:
            Names of those that were removed.

        Raises:
            OSError: nothing was done.
        """
        names = self._database.release(keys)
        self._end(names)
        self._must_forget = True
        self._forget()
        return names

    def _forget(self) -> None:
        if self._must_forget:
            self._must_forget = not self._database.forget_deleted()

    def remember(self, notes: Notes) -> None:
        """To be written down with the next `note` or `write`. Waits for nothing."""
        self._database.remember(notes)

    def note(self) -> None:
        """Writes down what is to be remembered.

        Raises:
            OSError: it was not.
        """
        self._database.note()

    def changes(self) -> RecordChanges:
        """What other engines have changed since the last call.

        Raises:
            OSError: it could not be read.
        """
        return self._database.changes()

    def clean(self) -> None:
        """Ends what engines have begun that are dead, and what this one could not end before.

        Raises:
            OSError: some of it is left.
        """
        mine, self._unsettled = [*self._unsettled], {}
        if mine:
            self._end(mine)
        others = {*self._database.unsettled()} - {NOBODY, self._leases.name}
        if others:
            self._end_all(self._leases.expired(others))
        self._end_all([NOBODY])
        self._forget()

    def close(self) -> None:
        """Ends the use of the store."""
        self._database.close()
        self._leases.close()
