# SPDX-License-Identifier: Apache-2.0
"""Keys of records, made of vLLM's names of their blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

_DIGEST_BYTES = 28
_GROUP = bytes(4)
"""Ends a key: vLLM reads the KV cache group from there (`v1/kv_offload/base.py`)."""


def record_keys(
    fingerprint: bytes, name_of: Callable[[int], tuple[bytes, bool] | None]
) -> Callable[[int], bytes | None]:
    """How a block's record is called: a function of the block's id; None for one without a name.

    An exact name stands for the block's content: its key is equal in every process that runs the
    same model. Any other is a number of this process, and its key is equal in no other.

    Args:
        fingerprint: of the model, up to 64 bytes.
        name_of: vLLM's name of a block, and whether it is an exact one.
    """
    secret = os.urandom(32)

    def key_of(block: int) -> bytes | None:
        named = name_of(block)
        if named is None:
            return None
        name, is_exact = named
        return exact_key(fingerprint if is_exact else secret, name)

    return key_of


def exact_key(fingerprint: bytes, name: bytes) -> bytes:
    """Key of the record of a block that has an exact name, whether or not it is resident.

    Args:
        fingerprint: as in `record_keys`.
        name: vLLM's, with its group.
    """
    return hashlib.blake2b(name, digest_size=_DIGEST_BYTES, key=fingerprint).digest() + _GROUP
