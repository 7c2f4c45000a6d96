# SPDX-License-Identifier: Apache-2.0
"""Records on disk encrypted: AES-256-GCM with a key of its own for each.

    master key       of the operator; wraps the keys of records, and is nowhere on disk
    key of a record  in its row of the database, wrapped; opens its file, and what the row says of
                     its tokens
    digest key       made from the master key; namespaces and keys of records are digests with it

When the row is deleted, nothing opens the file any more, wherever a copy of it may be.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from segreuse_store.sealing import KEY_ENV, CorruptError

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("vllm.segreuse")

_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16


class Aes256Gcm:
    """A `Sealer`. Every seal has a new random nonce, and a key seals two things at most."""

    algorithm = 1

    def __init__(self, master_key: bytes) -> None:
        """Use a master key [32 bytes]."""
        self._master = AESGCM(master_key)
        self.identity = _derived(master_key, b"identity")
        self.digest_key: bytes | None = _derived(master_key, b"digests")

    def new_secret(self) -> bytes:
        """A new key, wrapped."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._master.encrypt(nonce, os.urandom(_KEY_BYTES), None)

    def _key(self, secret: bytes) -> bytes:
        nonce, wrapped = secret[:_NONCE_BYTES], secret[_NONCE_BYTES:]
        return self._master.decrypt(nonce, wrapped, None)

    def seal(self, secret: bytes, context: bytes, data: Buffer) -> tuple[Buffer, bytes]:
        """The ciphertext, and nonce and tag."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = memoryview(AESGCM(self._key(secret)).encrypt(nonce, memoryview(data), context))
        return sealed[:-_TAG_BYTES], nonce + bytes(sealed[-_TAG_BYTES:])

    def open(self, secret: bytes, context: bytes, sealed: Buffer, proof: Buffer) -> Buffer:
        """The plain bytes, in memory that can be written: whoever gets them can zero it."""
        nonce, tag = bytes(proof)[:_NONCE_BYTES], bytes(proof)[_NONCE_BYTES:]
        plain = bytearray(memoryview(sealed).nbytes)
        try:
            decryptor = Cipher(AES(self._key(secret)), GCM(nonce, tag)).decryptor()
            decryptor.authenticate_additional_data(context)
            decryptor.update_into(memoryview(sealed), plain)
            decryptor.finalize()
        except (InvalidTag, ValueError) as error:  # ValueError: too short for either
            plain[:] = bytes(len(plain))
            raise CorruptError("the bytes are not those that were encrypted") from error
        return plain


def _derived(master_key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(purpose, digest_size=_KEY_BYTES, key=master_key).digest()


def master_key(key_file: str | None, environment: Mapping[str, str]) -> bytes:
    """The operator's key [32 bytes].

    Args:
        key_file: a file with the key as hex or base64; None: as the environment's
            `SEGREUSE_TIER_KEY` says.
        environment: variables.

    Raises:
        ValueError: there is none, or it is no key of 32 bytes.
    """
    if key_file is None:
        text, where = environment.get(KEY_ENV, ""), KEY_ENV
    else:
        text, where = _read(key_file), key_file
    text = text.strip()
    for decode in (bytes.fromhex, _from_base64):
        try:
            key = decode(text)
        except ValueError:
            continue
        if len(key) == _KEY_BYTES:
            return key
    raise ValueError(f"{where} must hold a key of {_KEY_BYTES} bytes as hex or base64")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _read(key_file: str) -> str:
    try:
        with open(key_file, encoding="ascii", errors="replace") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                logger.warning("segment reuse: %s can be read by other users", key_file)
            return file.read(1024)
    except OSError as error:
        raise ValueError(f"the key file {key_file} cannot be read: {error.strerror}") from error
