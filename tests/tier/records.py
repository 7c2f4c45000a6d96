# SPDX-License-Identifier: Apache-2.0
"""Records and stores for the tests of the file tier."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_segreuse.tier.catalogue import StoredRecord
from vllm_segreuse.tier.disk import Disk
from vllm_segreuse.tier.folder import RecordFolder
from vllm_segreuse.tier.sealing import Sealer
from vllm_segreuse.tier.seats import Owner

PAYLOAD_BYTES = 8192
FINGERPRINT = bytes(range(32))
SLOTS = 10_000


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def payload_of(number: int) -> bytes:
    """What the record of this number holds, and no other."""
    return np.random.default_rng(number).bytes(PAYLOAD_BYTES)


def record(
    number: int, durable: bool = False, namespaces: tuple[bytes, ...] = (b"alice",)
) -> StoredRecord:
    return StoredRecord(
        key=key_of(number),
        tokens=np.arange(number, number + 32, dtype=np.int32),
        position=32 * number,
        depth=number % 3,
        namespaces=namespaces,
        parent=key_of(number - 1) if number else None,
        durable=durable,
    )


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
