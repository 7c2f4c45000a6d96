# SPDX-License-Identifier: Apache-2.0
"""What a record is on disk: a file of its own, and what is known of it in a row of the database.

The file is the row of the host region as it is (sealed), and a trailer of `TRAILER_BYTES`:

    payload                      the region's row, or its ciphertext
    header                       magic, version, codec, algorithm, digest of the key, fingerprint,
                                 position, depth, bytes of the payload
    proof                        of payload and header (`sealing.py`)

A reader knows the header beforehand, from the database: a file that was exchanged for another one,
that is of another model or of another format, does not have it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_segreuse.tier.catalogue import StoredRecord
from vllm_segreuse.tier.sealing import PROOF_BYTES, CorruptError, Sealer

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 1
KEY_BYTES = 32
DIGEST_BYTES = 16
CODECS = {"raw": 0, "int8": 1, "fp8": 2}

_MAGIC = b"SEGREUSE"
_HEADER = struct.Struct(f"<8sHBB{KEY_BYTES}s{KEY_BYTES}sqIQ4x")
# Key, position, depth, tokens, namespaces, and whether there is a parent.
_ABOUT = struct.Struct(f"<{KEY_BYTES}sqIIHB")
TRAILER_BYTES = _HEADER.size + PROOF_BYTES
_PAGE_BYTES = 4096


def record_bytes(payload_bytes: int) -> int:
    """Bytes of the device that a record with so large a payload takes: whole pages."""
    return -(-(payload_bytes + TRAILER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


class DiskRecord(NamedTuple):
    """A record on disk, as the database has it.

    Attributes:
        name: of its file, below the store's folder.
        secret: what opens it; see `Sealer`.
        about: key, tokens, position and so on; see `record_of`.
        durable: removed last.
        mine: whether this engine has written it, in this run or an earlier one.
    """

    name: str
    secret: bytes
    about: bytes
    durable: bool
    mine: bool = True

    @property
    def key(self) -> bytes:
        """Of the record [32 bytes]."""
        return self.about[:KEY_BYTES]


def about(record: StoredRecord, namespaces: Sequence[bytes]) -> bytes:
    """What is known of a record.

    Args:
        record: as the scheduler's side has it.
        namespaces: digests that stand for its namespaces [16 bytes each].
    """
    tokens = np.asarray(record.tokens, dtype="<i4")
    parent = record.parent or b""
    counts = (len(tokens), len(namespaces), bool(parent))
    head = _ABOUT.pack(record.key, record.position, record.depth, *counts)
    return b"".join((head, parent, *namespaces, tokens.tobytes()))


def record_of(kept: DiskRecord) -> StoredRecord:
    """The record; digests stand in for its namespaces."""
    key, position, depth, tokens, namespaces, has_parent = _ABOUT.unpack_from(kept.about)
    at = _ABOUT.size + KEY_BYTES * has_parent
    end = at + DIGEST_BYTES * namespaces
    return StoredRecord(
        key=key,
        tokens=np.frombuffer(kept.about, dtype="<i4", count=tokens, offset=end),
        position=position,
        depth=depth,
        namespaces=tuple(kept.about[i : i + DIGEST_BYTES] for i in range(at, end, DIGEST_BYTES)),
        parent=kept.about[_ABOUT.size : at] or None,
        durable=kept.durable,
    )


class Sealed(NamedTuple):
    """How the files of a store are sealed.

    Attributes:
        fingerprint: of the model [32 bytes].
        digest_key: keys are in the files as digests, which nobody else can compare with anything.
        sealer: of payload and header.
        codec: of the rows.
    """

    fingerprint: bytes
    digest_key: bytes
    sealer: Sealer
    codec: str = "raw"

    def header(self, kept: DiskRecord, payload_bytes: int) -> bytes:
        """The header of a record's file."""
        key, position, depth, *_ = _ABOUT.unpack_from(kept.about)
        digest = hashlib.blake2b(key, digest_size=KEY_BYTES, key=self.digest_key).digest()
        kind = (_MAGIC, VERSION, CODECS[self.codec], self.sealer.algorithm)
        return _HEADER.pack(*kind, digest, self.fingerprint, position, depth, payload_bytes)

    def file(self, kept: DiskRecord, payload: Buffer) -> tuple[Buffer, bytes]:
        """What the file of a record holds: payload and trailer."""
        head = self.header(kept, memoryview(payload).nbytes)
        body, proof = self.sealer.seal(kept.secret, head, payload)
        return body, head + proof

    def payload(self, kept: DiskRecord, content: memoryview) -> Buffer:
        """The payload of a record's file.

        Raises:
            CorruptError: it is not the file of this record, or damaged.
        """
        body, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
        head = self.header(kept, body.nbytes)
        if trailer[: len(head)] != head:
            raise CorruptError("the file is not that of this record")
        return self.sealer.open(kept.secret, head, body, trailer[len(head) :])
