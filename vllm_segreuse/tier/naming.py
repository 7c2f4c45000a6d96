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
        domain = fingerprint if is_exact else secret
        return hashlib.blake2b(name, digest_size=_DIGEST_BYTES, key=domain).digest() + _GROUP

    return key_of
