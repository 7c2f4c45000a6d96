# SPDX-License-Identifier: Apache-2.0
"""What is known of each record of the second tier: one block's KV, of all layers and ranks."""

from __future__ import annotations

from typing import NamedTuple

from vllm_segreuse.plan import IntArray


class StoredRecord(NamedTuple):
    """What has to be stored beside a record's KV, so that it can be found again after a restart.

    Attributes:
        key: 32 bytes. Records with equal keys hold the same KV.
        tokens: int32 `[block_size]`.
        position: of the first token in the sequence that it was computed in.
        depth: provenance depth; 0: exact.
        namespaces: keys of the namespaces that know it (`cache/namespace.py`). They contain salts:
            what is written holds digests of them only.
        parent: key of the record of the block in front of it; None: it is the first, or unknown.
        durable: part of a knowledge base's document: other records are removed first.
    """

    key: bytes
    tokens: IntArray
    position: int
    depth: int
    namespaces: tuple[bytes, ...]
    parent: bytes | None
    durable: bool
