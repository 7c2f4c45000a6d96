# SPDX-License-Identifier: Apache-2.0
"""How bytes on disk are proven to be what was written: by a checksum here, by a cipher in
`encryption.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

PROOF_BYTES = 28
KEY_ENV = "SEGREUSE_TIER_KEY"
"""The environment's variable that holds the operator's key, where no file does."""


class CorruptError(ValueError):
    """Bytes on disk are not those that were written, or not where they were written."""


class Sealer(Protocol):
    """Seals the payload of a record and what is known of it.

    Attributes:
        algorithm: its number in the files.
        identity: bytes that stores of other sealers, or of other keys, do not have.
        digest_key: of the digests of namespaces and keys; None: the store has one of its own.
    """

    algorithm: int
    identity: bytes
    digest_key: bytes | None

    def new_secret(self) -> bytes:
        """What a record of its own needs to be opened again, itself protected; empty if nothing."""

    def seal(self, secret: bytes, context: bytes, data: Buffer) -> tuple[Buffer, bytes]:
        """The bytes to write for `data`, and the proof of these and of `context` [28 bytes].

        Args:
            secret: of the record.
            context: what the data belongs to; proven, and not written.
            data: any contiguous bytes.
        """

    def open(self, secret: bytes, context: bytes, sealed: Buffer, proof: Buffer) -> Buffer:
        """The data that was sealed.

        Raises:
            CorruptError: secret, context, bytes or proof are others.
        """


class Checksum:
    """XXH3-128: finds damage of every kind. It stops nobody who writes files on purpose."""

    algorithm = 0
    identity = b""
    digest_key: bytes | None = None

    def new_secret(self) -> bytes:
        """Nothing is secret."""
        return b""

    def seal(self, secret: bytes, context: bytes, data: Buffer) -> tuple[Buffer, bytes]:
        """The data itself, and its checksum."""
        state = xxhash.xxh3_128(data)
        state.update(context)
        return data, state.digest().rjust(PROOF_BYTES, b"\0")

    def open(self, secret: bytes, context: bytes, sealed: Buffer, proof: Buffer) -> Buffer:
        """The data, if the checksum is its own."""
        if self.seal(secret, context, sealed)[1] != proof:
            raise CorruptError("the checksum is not that of the bytes")
        return sealed
