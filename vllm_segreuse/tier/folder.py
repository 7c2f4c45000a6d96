# SPDX-License-Identifier: Apache-2.0
"""A store of files: one file per record, and a database that names them.

    STORE/lock              locked by the one engine that uses the store
    STORE/records.sqlite    which records there are (`database.py`)
    STORE/digests.key       key of the digests of namespaces, whose names hold salts, and of keys
    STORE/files/XX/NAME     a record (`format.py`)

A record is written to a file of a new name, which is then synced, and its folder; then its row is
committed. It is removed in the other order. So whatever a crash leaves is a file that no row names,
or a row without a file: both are removed at the next start, and neither is ever read. A file is
never renamed and never written again: the commit is what makes it a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_segreuse.tier.catalogue import StoredRecord
from vllm_segreuse.tier.database import DamagedError, Database
from vllm_segreuse.tier.disk import Disk
from vllm_segreuse.tier.format import (
    DIGEST_BYTES,
    TRAILER_BYTES,
    Kept,
    Sealed,
    about,
)
from vllm_segreuse.tier.sealing import Checksum, CorruptError, Sealer

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("vllm.segreuse")

_FOLDERS = 256
_KEY_BYTES = 32
_MOST_STORES = 64
_OURS = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}")
_PAGE_BYTES = 4096
_DATABASE = "records.sqlite"


class LostError(LookupError):
    """A record cannot be had any more.

    Attributes:
        reason: `missing`, `torn` or `corrupt`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RecordFolder:
    """The records of one model that one engine keeps. Reads and writes may run in any thread."""

    def __init__(
        self,
        path: str,
        fingerprint: bytes,
        payload_bytes: int,
        sealer: Sealer | None = None,
        disk: Disk | None = None,
        codec: str = "raw",
    ) -> None:
        """Open the first store below the path that no other engine uses, or make one.

        Stores of other models, and of other keys, lie in folders of their own and stay as they are.

        Args:
            path: folder of all stores.
            fingerprint: of the model [32 bytes].
            payload_bytes: bytes of a row of the host region.
            sealer: what protects the records; by default a checksum.
            disk: the system calls.
            codec: by which rows are stored; part of the fingerprint, too.

        Raises:
            OSError: the folder cannot be written.
        """
        self.disk = disk or Disk()
        self._sealer = sealer or Checksum()
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        self.record_bytes = -(-(payload_bytes + TRAILER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        """Bytes of the device that a record takes."""
        identity = hashlib.blake2b(fingerprint + self._sealer.identity, digest_size=16)
        self._lock, self.path = self._locked(os.path.join(path, identity.hexdigest()))
        try:
            self._files = os.path.join(self.path, "files")
            for number in range(_FOLDERS):
                self.disk.make_folder(os.path.join(self._files, f"{number:02x}"))
            self.disk.sync_folder(self._files)
            self._sealed = Sealed(fingerprint, self._digest_key(), self._sealer, codec)
            self._database, kept = self._opened()
            self.at_start = kept
            """Records that were there, from the least to the most recently used."""
        except BaseException:
            os.close(self._lock)
            raise

    def _locked(self, path: str) -> tuple[int, str]:
        for number in range(_MOST_STORES):
            store = os.path.join(path, str(number))
            self.disk.make_folder(store)
            lock = self.disk.lock(os.path.join(store, "lock"))
            if lock is not None:
                return lock, store
        raise OSError(f"all {_MOST_STORES} stores of {path} are used by other engines")

    def _digest_key(self) -> bytes:
        if self._sealer.digest_key is not None:
            return self._sealer.digest_key
        path = os.path.join(self.path, "digests.key")
        into = memoryview(bytearray(_KEY_BYTES))
        with contextlib.suppress(FileNotFoundError):
            if self.disk.read(path, into) == len(into):
                return bytes(into)
        # Without it nothing that is there can be found or read.
        self._remove_database()
        self.disk.remove(path)
        self.disk.write(path, [key := secrets.token_bytes(_KEY_BYTES)])
        return key

    def _remove_database(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.disk.remove(os.path.join(self.path, _DATABASE + suffix))

    def _opened(self) -> tuple[Database, list[Kept]]:
        path = os.path.join(self.path, _DATABASE)
        try:
            return self._checked(Database(path, self._fingerprint, self._sealer))
        except DamagedError as error:
            logger.warning(
                "segment reuse: %s is damaged (%s): begins with an empty store", path, error
            )
        self._remove_database()
        return self._checked(Database(path, self._fingerprint, self._sealer))

    def _checked(self, database: Database) -> tuple[Database, list[Kept]]:
        """Removes what a crash has left, and rows that are damaged."""
        try:
            rows = list(database.rows())
            sizes = dict(self.disk.sizes(self._files))
            size = self._payload_bytes + TRAILER_BYTES
            sound = [row for _, row in rows if row and sizes.get(row.name) == size]
            # The last of equal keys: a removal that failed leaves an earlier one.
            kept = list({row.key: row for row in sound}.values())
            names = {row.name for row in kept}
            lost = [name for name, _ in rows if name not in names]
            if lost:
                database.change(leaving=lost)
        except BaseException:
            database.close()
            raise
        garbage = [name for name in sizes if name not in names and _OURS.fullmatch(name)]
        for name in garbage:
            self.disk.remove(os.path.join(self._files, name))
        if lost or garbage:
            logger.info(
                "segment reuse: removed %d records and %d files from %s that a crash or damage "
                "has left",
                *(len(lost), len(garbage), self.path),
            )
        return database, kept

    def digest(self, namespace: bytes) -> bytes:
        """What stands for a namespace on disk."""
        keyed = hashlib.blake2b(namespace, digest_size=DIGEST_BYTES, key=self._sealed.digest_key)
        return keyed.digest()

    def new(self, record: StoredRecord) -> Kept:
        """How a record will be kept, once `write` has written it."""
        namespaces = [self.digest(namespace) for namespace in record.namespaces]
        number = secrets.randbits(128)
        name = f"{number % _FOLDERS:02x}/{number:032x}"
        described = about(record, namespaces)
        secret = self._sealer.new_secret()
        return Kept(name, secret, described, record.durable)

    def write(self, records: Sequence[tuple[Kept, Buffer]]) -> None:
        """Stores records, and returns once they are on the device.

        Args:
            records: new ones, and their payloads, which must not change meanwhile.

        Raises:
            OSError: none of them is stored. Files and rows may be left that `remove` removes.
        """
        for kept, payload in records:
            path = os.path.join(self._files, kept.name)
            self.disk.write(path, self._sealed.file(kept, payload))
        for folder in {os.path.dirname(kept.name) for kept, _ in records}:
            self.disk.sync_folder(os.path.join(self._files, folder))
        self._database.change(coming=[kept for kept, _ in records])

    def read(self, kept: Kept) -> Buffer:
        """The payload of a record, verified.

        Raises:
            LostError: it is missing or damaged.
            OSError: it could not be read.
        """
        size = self._payload_bytes + TRAILER_BYTES
        content = memoryview(bytearray(size + 1))  # one more: a file that is too long is another
        try:
            found = self.disk.read(os.path.join(self._files, kept.name), content)
        except FileNotFoundError:
            raise LostError("missing") from None
        if found != size:
            raise LostError("torn")
        try:
            return self._sealed.payload(kept, content[:size])
        except CorruptError:
            raise LostError("corrupt") from None

    def remove(self, records: Sequence[Kept]) -> None:
        """Removes records: their rows first, then their files.

        Raises:
            OSError: some may be left. What is gone already is no error: try again with all.
        """
        self._database.change(leaving=[kept.name for kept in records])
        for kept in records:
            self.disk.remove(os.path.join(self._files, kept.name))

    def note(self, used: Mapping[str, float], durable: Mapping[str, bool]) -> None:
        """Writes down when records were used, and which are durable, by name.

        Raises:
            OSError: it was not written.
        """
        self._database.change(used=used, durable=durable)

    def erase_removed(self) -> None:
        """Overwrites what the database still has of removed rows; see `Database`."""
        self._database.forget_deleted()

    def close(self) -> None:
        """Ends the use of the store, which another engine may then open."""
        self._database.close()
        os.close(self._lock)
