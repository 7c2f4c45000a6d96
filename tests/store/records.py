# SPDX-License-Identifier: Apache-2.0
"""Records and stores for the tests of the store."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segreuse_store.disk import Disk
from segreuse_store.folder import RecordFolder
from segreuse_store.format import StoredRecord
from segreuse_store.leases import Owner
from segreuse_store.sealing import Sealer

PAYLOAD_BYTES = 8192
FINGERPRINT = bytes(range(32))
SLOTS = 10_000


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def payload_of(number: int) -> bytes:
    """What the record of this number holds, and no other."""
    return np.random.default_rng(number).bytes(PAYLOAD_BYTES)


def about_of(number: int, labels: Sequence[bytes] = ()) -> bytes:
    """What is known of the record of this number, and of no other: it begins as another's may."""
    head = struct.pack("<qIB", 32 * number, number % 3, len(labels))
    return head + b"".join(labels) + b"the text of %d" % number


def labels_of(about: bytes) -> list[bytes]:
    """The labels [16 bytes each] that `about_of` was given."""
    return [about[at : at + 16] for at in range(13, 13 + 16 * about[12], 16)]


def record(number: int, durable: bool = False, labels: Sequence[bytes] = ()) -> StoredRecord:
    return StoredRecord(key_of(number), about_of(number, labels), durable)


def folder(
    path: Path,
    sealer: Sealer | None = None,
    disk: Disk | None = None,
    fingerprint: bytes = FINGERPRINT,
    owner: Owner | None = None,
) -> RecordFolder:
    return RecordFolder(str(path), fingerprint, PAYLOAD_BYTES, sealer, disk, owner=owner)


def write(store: RecordFolder, *numbers: int) -> None:
    store.write([(store.new(record(number)), payload_of(number)) for number in numbers], SLOTS)


def files(path: Path) -> list[Path]:
    """Files of records below the path."""
    return sorted(found for found in path.glob("*/files/*/*") if found.is_file())


class FaultyDisk(Disk):
    """Calls of the methods in `faults` raise or hang first.

    Attributes:
        faults: what to call instead, by method, until it is removed; it may fall through.
        calls: names of the methods called.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Callable[[], None]] = {}

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def called(*args: Any, **named: Any) -> Any:
            fault = self.faults.get(name)
            if fault is not None:
                fault()
            return method(*args, **named)

        return called


@contextlib.contextmanager
def no_file_grows() -> Iterator[None]:
    """Every write to a file fails, also those of SQLite, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def raises(number: int) -> Callable[[], None]:
    def fault() -> None:
        raise OSError(number, "made by the test")

    return fault


class Hang:
    """A fault that hangs until it is released.

    Attributes:
        reached: set once a thread hangs.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        self.released.wait(60)
