# SPDX-License-Identifier: Apache-2.0
"""Virtual blocks: which physical block holds the KV of which tokens, in which namespace.

One physical block may be known in several namespaces: vLLM shares the blocks of a common prefix,
and each namespace that meets them may reuse them at other offsets, too. `links` has the layout of
the entries, and the loops that maintain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.integrity import check
from vllm_segreuse.cache.links import (
    DEPTH,
    NODE,
    UNUSED,
    CountArray,
    DepthArray,
    IntArray,
    Nodes,
    find_ancestors,
    find_entries,
    find_missing,
    insert_blocks,
    remove_blocks,
)
from vllm_segreuse.cache.rolling_hash import (
    TokenArray,
    window_anchors,
    window_hashes,
)
from vllm_segreuse.config import MAX_PROVENANCE_DEPTH

# Slots per block. Sparse tables: what a window finds there is nearly always a hit.
BUCKETS_PER_BLOCK = 4
ANCHORS_PER_BLOCK = 32
# Entries, that is, namespaces a block may be known in on average before the entries must move.
ENTRIES_PER_BLOCK = 4
CACHE_LINE_BYTES = 64
GOLDEN = 0x9E3779B97F4A7C15
_STEPS = 2**32 - 1  # then their numbers begin anew, with 1


def bytes_per_block(block_size: int) -> int:
    """Most bytes that an index reserves per block, without what it keeps of images."""
    return 4 * block_size + 360


class SegmentIndex:
    """(namespace, tokens of one full KV block) -> physical blocks, positions, provenance depths.

    Single writer, no locks: it lives in the scheduler's thread.

    Attributes:
        num_blocks: physical blocks of the pool; ids are `0 .. num_blocks - 1`.
        block_size: tokens per block.
        version: changes whenever the answer to a match may change (insert, remove, clear, and a
            step that ends the freshness of blocks). The key of match memos.
        lags: int32 `[num_blocks, block_size]`: of each token of each block, how far the images in
            front of it hold its number back (`plan/images.py`); None: there was no image yet.
        step: number of the current step, from 1. It begins anew after 2**32 - 1 steps: a block that
            has stayed for exactly as long is then fresh for one step, that is, no donor in it.
        contexts: uint64 `[num_blocks]`, what each block was computed behind (`contexts.py`).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Reserve `4 * block_size + 312` to `360` bytes per block; pages are touched when used.

        192 of them are for blocks known in several namespaces. Should those not suffice, the
        entries move to an array twice as large. The first image takes `4 * block_size` more.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"an index of {num_blocks} blocks of {block_size} tokens is not possible: "
                "both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.version = 0
        self.step = 1
        self._allocate()

    def _allocate(self) -> None:
        self._size = 0
        self._has_fresh = False
        power = 1 << (self.num_blocks - 1).bit_length()
        self._set_nodes(_aligned_zeros(ENTRIES_PER_BLOCK * self.num_blocks, NODE))
        self.spares: IntArray = np.array([-1, self.num_blocks], np.int32)
        self.tokens: TokenArray = _aligned_zeros(self.num_blocks * self.block_size, np.int32)
        self.tokens = self.tokens.reshape(self.num_blocks, self.block_size)
        self.contexts: npt.NDArray[np.uint64] = np.zeros(self.num_blocks, np.uint64)
        self.heads: IntArray = np.full(BUCKETS_PER_BLOCK * power, -1, np.int32)
        self.anchor_counts: CountArray = np.zeros(ANCHORS_PER_BLOCK * power, np.uint8)
        self._population: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        self.lags: IntArray | None = None

    def _set_nodes(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._born = nodes["born"]

    def begin_step(self) -> None:
        """Start a schedule(): what was inserted before it is computed by now, no longer fresh."""
        self.step = self.step % _STEPS + 1
        if self._has_fresh:
            self._has_fresh = False
            self.version += 1

    def insert(
        self,
        namespace: int,
        block_ids: IntArray,
        tokens: TokenArray,
        first_position: int,
        parent_block: int = -1,
        depths: int | DepthArray = 0,
        fresh: bool = True,
        contexts: npt.NDArray[np.uint64] | None = None,
        lags: IntArray | None = None,
    ) -> None:
        """Index consecutive full blocks of one sequence.

        A block that is not indexed yet is fresh until `begin_step`. One that is, with the same
        tokens, position and depth, is known in this namespace from now on, too, and as fresh as it
        was; beyond `links.MAX_VIEWS` namespaces it is left as it is. In any other case the id was
        reused for other KV, and all that was known of it is replaced.

        Args:
            namespace: small non-negative integer (`NamespaceTable.intern`).
            block_ids: int32 `[n]`, physical blocks.
            tokens: int32 `[n * block_size]`.
            first_position: position of `tokens[0]` in the sequence.
            parent_block: physical block of the tokens just before `first_position`; -1: none or
                unknown. A block that is not indexed there, in this namespace, is taken for unknown.
            depths: provenance depth of all blocks, or of each `[n]`; at most
                `MAX_PROVENANCE_DEPTH`.
            fresh: False: their KV is there already, so they may donate at once.
            contexts: uint64 `[n]`, see `contexts.py`; None: not known.
            lags: int32 `[n * block_size]`, of the tokens; None: 0.

        Raises:
            ValueError: sizes disagree, or an id, namespace, position or depth is out of range.
        """
        namespace, first_position = int(namespace), int(first_position)
        block_ids = np.require(block_ids, np.int32, ("C", "W"))
        tokens = np.require(tokens, np.int32, ("C", "W"))
        count = block_ids.size
        if tokens.size != count * self.block_size:
            raise ValueError(
                f"{count} blocks of {self.block_size} tokens need {count * self.block_size} "
                f"tokens, got {tokens.size}: pass full blocks only"
            )
        if not count:
            return
        # Reductions are most of what one block takes, and one comes with every answer's block.
        lowest, deepest = (
            (depths, depths) if isinstance(depths, int) else (depths.min(), depths.max())
        )
        self._check_insert(namespace, block_ids, first_position, int(lowest), int(deepest))
        self._note_lags(block_ids, lags)
        self._reserve_views(block_ids)
        grown, changed = insert_blocks(
            self.nodes,
            self.tokens,
            self.heads,
            self.anchor_counts,
            self._population,
            self.spares,
            self.step if fresh else (self.step - 2) % _STEPS + 1,
            namespace,
            salt_of(namespace),
            block_ids,
            tokens,
            window_hashes(tokens, self.block_size)[:: self.block_size].copy(),
            window_anchors(tokens, self.block_size)[:: self.block_size].copy(),
            first_position,
            int(parent_block),
            np.full(count, depths, DEPTH),
        )
        self.contexts[block_ids] = 0 if contexts is None else contexts
        self._size += grown
        if changed:
            self._has_fresh |= fresh
            self.version += 1

    def _note_lags(self, block_ids: IntArray, lags: IntArray | None) -> None:
        if self.lags is None and lags is not None:
            self.lags = _aligned_zeros(self.num_blocks * self.block_size, np.int32)
            self.lags = self.lags.reshape(self.num_blocks, self.block_size)
        if self.lags is not None:
            self.lags[block_ids] = 0 if lags is None else lags.reshape(-1, self.block_size)

    def lags_of(self, block_ids: IntArray) -> IntArray | None:
        """Lags of the tokens of blocks, int32 `[n * block_size]`; None: there was no image yet."""
        return None if self.lags is None else self.lags[block_ids].ravel()

    def is_text(self, block_id: int) -> bool:
        """Whether an indexed block holds text that no image stands in front of."""
        if self.lags is None:
            return True
        return not self.lags[block_id].any() and bool((self.tokens[block_id] >= 0).all())

    def image_tokens(self) -> IntArray:
        """Ids of the tokens of images in indexed blocks, int32 `[n]`. O(blocks)."""
        tokens = self.tokens[self._born[: self.num_blocks] != 0]
        return np.asarray(tokens[tokens < 0], np.int32)

    def _reserve_views(self, block_ids: IntArray) -> None:
        """Make room for a further entry of each block that has one."""
        wanted = int(self.spares[UNUSED]) + int(np.count_nonzero(self._born[block_ids]))
        if wanted > self.nodes.size:
            grown = _aligned_zeros(max(wanted, 2 * self.nodes.size), NODE)
            grown[: self.nodes.size] = self.nodes
            self._set_nodes(grown)

    def _check_insert(
        self, namespace: int, block_ids: IntArray, position: int, lowest: int, deepest: int
    ) -> None:
        if block_ids.min() < 0 or block_ids.max() >= self.num_blocks:
            raise ValueError(
                f"block ids {block_ids.min()}..{block_ids.max()} are outside of "
                f"0..{self.num_blocks - 1}: the index was built for another pool"
            )
        if namespace < 0 or position < 0 or lowest < 0:
            raise ValueError(
                f"namespace {namespace}, position {position} and depth {lowest} "
                "must not be negative"
            )
        if deepest > MAX_PROVENANCE_DEPTH:
            raise ValueError(f"depth {deepest} is above {MAX_PROVENANCE_DEPTH}")
        if namespace >= self._population.size:
            grown = np.zeros(2 * namespace, np.int64)
            grown[: self._population.size] = self._population
            self._population = grown

    def remove(self, block_ids: Sequence[int]) -> int:
        """Forget blocks in all namespaces (vLLM evicted them).

        O(1) per block and namespace, amortised.

        Returns:
            How many were indexed.
        """
        arrays = self.nodes, self.heads, self.anchor_counts, self._population, self.spares
        removed = remove_blocks(*arrays, np.asarray(block_ids, np.int64), self.num_blocks)
        if removed:
            self._size -= removed
            self.version += 1
        return removed

    def clear(self) -> None:
        """Forget everything."""
        self._allocate()
        self.version += 1

    def population(self, namespace: int) -> int:
        """Number of blocks known in a namespace."""
        return int(self._population[namespace]) if namespace < self._population.size else 0

    def missing(self, namespace: int, block_ids: IntArray) -> IntArray:
        """Indices, ascending, of the block ids that are not known in a namespace.

        Args:
            block_ids: int32 `[n]`, each in `0 .. num_blocks - 1`.
        """
        block_ids = np.require(block_ids, np.int32, ("C", "W"))
        return find_missing(self.nodes, block_ids, int(namespace))

    def entries(self, namespace: int, block_ids: IntArray) -> IntArray:
        """Rows of `nodes` that blocks have in a namespace; int32 `[n]`, -1: it does not know one.

        Args:
            block_ids: int32 `[n]`, each below `num_blocks`; negative ones are nobody's.
        """
        return find_entries(self.nodes, np.require(block_ids, np.int32, ("C", "W")), int(namespace))

    def ancestors(self, entry: int, count: int) -> IntArray:
        """Blocks in front of an entry in its sequence, the nearest last; `count` at most."""
        return find_ancestors(self.nodes, int(entry), int(count))

    def __len__(self) -> int:
        """Number of indexed physical blocks, whatever the number of their namespaces."""
        return self._size

    def __contains__(self, block_id: int) -> bool:
        """Whether the block is known in any namespace."""
        return 0 <= block_id < self.num_blocks and bool(self._born[block_id])

    def check_integrity(self) -> None:
        """Walk every link both ways; AssertionError with what is wrong. O(blocks), for tests."""
        check(self)


def was_before(step: int, other: int) -> bool:
    """Whether a step was before another one, less than 2**31 steps apart."""
    return 0 < (other - step) % _STEPS < 1 << 31


def salt_of(namespace: int) -> np.uint64:
    """XORed into a window's hash, so that namespaces with equal content do not share a chain."""
    return np.uint64((namespace * GOLDEN) % 2**64)


def _aligned_zeros(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that start at a cache line; numpy's own start 16 bytes behind one."""
    num_bytes = count * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
    offset = -raw.ctypes.data % CACHE_LINE_BYTES
    return raw[offset : offset + num_bytes].view(dtype)
