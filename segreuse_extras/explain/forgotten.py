# SPDX-License-Identifier: Apache-2.0
"""Which text was computed in a namespace and donates no more: a bounded memory.

Of each block two hashes of its tokens are kept, mixed with a secret digest of its namespace: what
is remembered of one namespace can be asked for in that one only. The newest replace the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.index import GOLDEN, SegmentIndex
from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import Nodes
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.cache.rolling_hash import (
    AnchorArray,
    HashArray,
    TokenArray,
    window_anchors,
    window_hashes,
)
from vllm_segreuse.plan import BoolArray
from vllm_segreuse.scheduling.donors import Follower


class Why(IntFlag):
    """Why a block does not donate; 0 marks an entry that was never used."""

    EVICTED = 1
    """vLLM took it for other tokens."""
    TOO_DEEP = 2
    """It was computed behind reused KV of the largest depth (`max_provenance_depth`)."""


class Forgotten(Follower):
    """One per engine.

    Args:
        index: read before a block is removed from it.
        namespaces: of the ids in the index.
        capacity: blocks that are remembered.
    """

    def __init__(self, index: SegmentIndex, namespaces: NamespaceTable, capacity: int) -> None:
        self._index = index
        self._namespaces = namespaces
        self._marks = np.zeros(capacity, np.uint64)
        self._why = np.zeros(capacity, np.uint8)
        self._next = 0
        self.removed(())  # compiled by now, not in a step
        flags_of(self._marks[:0], self._marks, self._why)

    def removed(self, block_ids: Sequence[int]) -> None:
        """Note them, in all namespaces."""
        self._next = _note_views(
            self._index.nodes,
            self._index.num_blocks,
            np.asarray(block_ids, np.int64),
            self._namespaces.digests,
            np.uint64(GOLDEN),
            self._marks,
            self._why,
            self._next,
            int(Why.EVICTED),
        )

    def too_deep(self, namespace: int, tokens: TokenArray) -> None:
        size = self._index.block_size
        hashes = window_hashes(tokens.ravel(), size)[::size]
        marks = self._marks_of(namespace, hashes, window_anchors(tokens.ravel(), size)[::size])
        places = np.arange(self._next, self._next + marks.size) % self._marks.size
        self._marks[places] = marks
        self._why[places] = Why.TOO_DEEP
        self._next = (self._next + marks.size) % self._marks.size

    def windows(self, prompt: Prompt) -> dict[Why, BoolArray]:
        """Which windows of a prompt are the content of such blocks: bool `[windows]`, by what
        became of the blocks."""
        size = self._index.block_size
        anchors = window_anchors(prompt.tokens, size)
        marks = self._marks_of(prompt.namespace, prompt.hashes(size), anchors)
        found = flags_of(marks, self._marks, self._why)
        return {why: (found & why) > 0 for why in Why}

    def _marks_of(self, namespace: int, hashes: HashArray, anchors: AnchorArray) -> HashArray:
        keys = hashes.astype(np.uint32).astype(np.uint64)
        return (keys << np.uint64(32) | anchors) ^ np.uint64(self._namespaces.digest(namespace))


@kernel
def flags_of(
    wanted: HashArray, marks: HashArray, flags: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Flags of all marks that are equal to each of those wanted; 0 where none is.

    In time linear in both: a request that waits for room is explained anew in each step, and there
    are hundreds of thousands of marks.
    """
    size = 2
    while size < 2 * wanted.size:
        size *= 2
    keys, is_taken = np.zeros(size, np.uint64), np.zeros(size, np.bool_)
    found = np.zeros(size, np.uint8)
    cells = np.empty(wanted.size, np.int64)
    for i in range(wanted.size):
        cells[i] = _cell_of(wanted[i], keys, is_taken)
        keys[cells[i]], is_taken[cells[i]] = wanted[i], True
    for i in range(marks.size):
        cell = _cell_of(marks[i], keys, is_taken)
        if is_taken[cell]:
            found[cell] |= flags[i]
    return found[cells]


@kernel
def _cell_of(mark: np.uint64, keys: HashArray, is_taken: BoolArray) -> int:
    """The cell of a mark in an open hash table, or the free one where it would be."""
    cell = np.int64((mark * np.uint64(GOLDEN)) >> np.uint64(32)) & (keys.size - 1)
    while is_taken[cell] and keys[cell] != mark:
        cell = (cell + 1) & (keys.size - 1)
    return int(cell)


@kernel
def _note_views(
    nodes: Nodes,
    num_blocks: int,
    block_ids: npt.NDArray[np.int64],
    digests: HashArray,
    golden: np.uint64,
    marks: HashArray,
    reasons: npt.NDArray[np.uint8],
    following: int,
    why: int,
) -> int:
    """Note all entries of blocks, as far as they are indexed; where the next mark goes."""
    for block in block_ids:
        if not 0 <= block < num_blocks or nodes[block].born == 0:
            continue
        entry = block
        while entry >= 0:
            node = nodes[entry]
            # The key's salt is that of the id, which another namespace may get later.
            salt = np.uint64(node.namespace) * golden & np.uint64(0xFFFFFFFF)
            key = np.uint64(node.key) ^ salt
            mark = key << np.uint64(32) | np.uint64(node.anchor)
            marks[following] = mark ^ digests[node.namespace]
            reasons[following] = why
            following = (following + 1) % marks.size
            entry = node.next_view
    return following
