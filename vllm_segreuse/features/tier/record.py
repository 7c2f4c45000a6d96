# SPDX-License-Identifier: Apache-2.0
"""What is known of each record of the second tier: one block's KV, of all layers and ranks.

    Seen       a block of vLLM's pool, as the index knows it
    Record     from the order to store it until it is lost: its place
    packed     what files keep of it, so that it is found again after a restart

`About` is what all three say of the content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from segreuse_store.format import DIGEST_BYTES, KEY_BYTES
from vllm_segreuse.plan import IntArray

# Position, depth, tokens, namespaces, and whether there is a parent. Files repeat the first two.
_HEAD = struct.Struct("<qIIHB")


class About(NamedTuple):
    """What a block's KV is of.

    Attributes:
        tokens: int32 `[block_size]`.
        position: of the first token in the sequence that it was computed in.
        depth: provenance depth; 0: exact.
        parent: key of the record of the block in front of it [32 bytes]; None: it is the first, or
            unknown.
    """

    tokens: IntArray
    position: int
    depth: int
    parent: bytes | None


class Seen(NamedTuple):
    """A block of vLLM's pool as the index knows it.

    Attributes:
        key: of its record, 32 bytes. Records with equal keys hold the same KV.
        about: of its KV.
        block: its id; -1: files have it.
        born: step of the index in which it was named; 0: it is a record.
        namespaces: ids, of those that have entries; none of them is forgotten before
            `RecordCatalogue.done_with`.
        parent_block: of the index, in front of it; -1: none.
        children: blocks of the pool behind it, with their keys.
        knowers: handle of all who know it beside who computed it (`Known.detach`); 0: nobody, or
            the block is still there.
    """

    key: bytes
    about: About
    block: int = -1
    born: int = 0
    namespaces: tuple[int, ...] = ()
    parent_block: int = -1
    children: tuple[tuple[int, bytes], ...] = ()
    knowers: int = 0


class Record:
    """A record, from the order to store it until it is lost.

    Attributes:
        key: 32 bytes.
        about: of its KV.
        entry: its id in the segment index; -1: the index does not know it.
        in_host, on_disk: where its content may be read.
        storing: whether a copy to host memory is under way.
        namespaces: ids, held until it is shown. After that the index has who knows it, and these
            are of whom files are told, if they still know it.
        last_seen: the block that it was made from; None: it is shown.
    """

    __slots__ = (
        "about",
        "entry",
        "in_host",
        "key",
        "last_seen",
        "namespaces",
        "on_disk",
        "storing",
    )

    def __init__(self, seen: Seen) -> None:
        self.key, self.about, self.entry = seen.key, seen.about, -1
        self.storing = self.in_host = self.on_disk = False
        self.namespaces = list(seen.namespaces)
        self.last_seen: Seen | None = seen

    @property
    def shown(self) -> bool:
        """Whether the index knows it."""
        return self.entry >= 0

    @property
    def is_exact(self) -> bool:
        """Whether what may be read of it is, to the last bit, what the model computes for the whole
        sequence up to its end."""
        return self.shown and self.about.depth == 0 and (self.in_host or self.on_disk)


def packed(about: About, namespaces: Sequence[bytes]) -> bytes:
    """What files keep beside the key: `StoredRecord.about`.

    Args:
        namespaces: digests of those that know the record [16 bytes each].
    """
    tokens = np.asarray(about.tokens, dtype="<i4")
    parent = about.parent or b""
    counts = (len(tokens), len(namespaces), bool(parent))
    head = _HEAD.pack(about.position, about.depth, *counts)
    return b"".join((head, parent, *namespaces, tokens.tobytes()))


def unpacked(content: bytes) -> About:
    """What was packed, but for the namespaces."""
    position, depth, tokens, namespaces, has_parent = _HEAD.unpack_from(content)
    end = _HEAD.size + KEY_BYTES * has_parent
    return About(
        tokens=np.frombuffer(content, "<i4", tokens, offset=end + DIGEST_BYTES * namespaces),
        position=position,
        depth=depth,
        parent=content[_HEAD.size : end] or None,
    )


def namespaces_of(content: bytes) -> Iterable[bytes]:
    """Digests of the namespaces that were packed [16 bytes each]."""
    *_, namespaces, has_parent = _HEAD.unpack_from(content)
    first = _HEAD.size + KEY_BYTES * has_parent
    places = range(first, first + DIGEST_BYTES * namespaces, DIGEST_BYTES)
    return [content[place : place + DIGEST_BYTES] for place in places]
