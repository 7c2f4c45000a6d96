# SPDX-License-Identifier: Apache-2.0
"""What a record is on disk: a file of its own, and what is known of it in a row of the database.

The file is the row of host memory as it is (sealed), and a trailer of `TRAILER_BYTES`:

    payload                      the row, or its ciphertext
    header                       magic, version, kind, algorithm, digest of the key, fingerprint,
                                 the first `HEAD_BYTES` of `about`, bytes of the payload
    proof                        of payload and header (`sealing.py`)

A reader knows the header beforehand, from the database: a file that was exchanged for another one,
that is of another model or of another format, does not have it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, NamedTuple

from segreuse_store.sealing import PROOF_BYTES, CorruptError, Sealer

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 1
KEY_BYTES = 32
DIGEST_BYTES = 16
HEAD_BYTES = 12

_MAGIC = b"SEGREUSE"
_HEADER = struct.Struct(f"<8sHBB{KEY_BYTES}s{KEY_BYTES}s{HEAD_BYTES}sQ4x")
TRAILER_BYTES = _HEADER.size + PROOF_BYTES
_PAGE_BYTES = 4096


def record_bytes(payload_bytes: int) -> int:
    """Bytes of the device that a record with so large a payload takes: whole pages."""
    return -(-(payload_bytes + TRAILER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


class StoredRecord(NamedTuple):
    """A record, but for its payload: what is to be stored, and what was.

    Attributes:
        key: 32 bytes. Records with equal keys have the same payload.
        about: what its owner knows of it; the store does not look into it.
        durable: other records make room first.
        name: of its file, below the store's folder; empty before the store has given it one.
        secret: what opens the file; see `Sealer`.
        mine: whether this engine has written it, in this run or an earlier one.
    """

    key: bytes
    about: bytes
    durable: bool = False
    name: str = ""
    secret: bytes = b""
    mine: bool = True


class Sealed(NamedTuple):
    """How the files of a store are sealed.

    Attributes:
        fingerprint: of the model [32 bytes].
        digest_key: keys are in the files as digests, which nobody else can compare with anything.
        sealer: of payload and header.
        kind: of the payloads, 0 to 255, as the owner numbers them.
    """

    fingerprint: bytes
    digest_key: bytes
    sealer: Sealer
    kind: int = 0

    def header(self, record: StoredRecord, payload_bytes: int) -> bytes:
        """The header of a record's file."""
        digest = hashlib.blake2b(record.key, digest_size=KEY_BYTES, key=self.digest_key).digest()
        return _HEADER.pack(
            _MAGIC,
            VERSION,
            self.kind,
            self.sealer.algorithm,
            digest,
            self.fingerprint,
            record.about[:HEAD_BYTES],
            payload_bytes,
        )

    def file(self, record: StoredRecord, payload: Buffer) -> tuple[Buffer, bytes]:
        """What the file of a record holds: payload and trailer."""
        head = self.header(record, memoryview(payload).nbytes)
        body, proof = self.sealer.seal(record.secret, head, payload)
        return body, head + proof

    def payload(self, record: StoredRecord, content: memoryview) -> Buffer:
        """The payload of a record's file.

        Raises:
            CorruptError: it is not the file of this record, or damaged.
        """
        body, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
        head = self.header(record, body.nbytes)
        if trailer[: len(head)] != head:
            raise CorruptError("the file is not that of this record")
        return self.sealer.open(record.secret, head, body, trailer[len(head) :])
