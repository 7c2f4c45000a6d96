# SPDX-License-Identifier: Apache-2.0
"""Virtual blocks: which physical block holds the KV of which tokens, in which namespace.

One physical block may be known in several namespaces: vLLM shares the blocks of a common prefix,
and each namespace that meets them may reuse them at other offsets, too. `links` has the layout of
the entries, and the loops that maintain them. A block has an entry in the namespace that it was
computed in; those of other namespaces that know it (`known`) are made when these are looked into.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.known import Known
from vllm_segreuse.cache.links import (
    DEPTH,
    MAX_VIEWS,
    NEW,
    NEW_VIEW,
    NODE,
    UNUSED,
    CountArray,
    DepthArray,
    IntArray,
    Nodes,
    add_views,
    drop_views,
    find_ancestors,
    find_entries,
    insert_blocks,
    remove_blocks,
)
from vllm_segreuse.cache.rolling_hash import (
    HashArray,
    TokenArray,
    window_anchors,
    window_hashes,
)
from vllm_segreuse.cache.shares import Shares
from vllm_segreuse.options.server import MAX_PROVENANCE_DEPTH
from vllm_segreuse.plan import BoolArray

# Prefixes that namespaces know of others, each counted once per namespace; and blocks of these, for
# each that there is. Behind that, who has the most gives back (`shares`).
MAX_KNOWN_PREFIXES = 1 << 17
MAX_KNOWN_PER_BLOCK = 8

# Slots per block. Sparse tables: what a window finds there is nearly always a hit.
BUCKETS_PER_BLOCK = 4
ANCHORS_PER_BLOCK = 32
# Entries, that is, namespaces a block may have entries in on average before these must move.
ENTRIES_PER_BLOCK = 4
CACHE_LINE_BYTES = 64
GOLDEN = 0x9E3779B97F4A7C15
_STEPS = 2**32 - 1  # then their numbers begin anew, with 1


def bytes_per_block(block_size: int) -> int:
    """Most bytes that an index reserves per block, without what it keeps of images."""
    return 4 * block_size + 364


class BlockFacts(NamedTuple):
    """What is known of blocks beside their tokens, position and depth.

    Attributes:
        fresh: False: their KV is there already, so they may donate at once.
        contexts: uint64 `[n]`, see `contexts.py`; None: not known.
        position_offsets: int32 `[n * block_size]`, of the tokens; None: 0.
    """

    fresh: bool = True
    contexts: npt.NDArray[np.uint64] | None = None
    position_offsets: IntArray | None = None


_NEW = BlockFacts()


class SegmentIndex:
    """(namespace, tokens of one full KV block) -> physical blocks, positions, provenance depths.

    Single writer, no locks: it lives in the scheduler's thread.

    Attributes:
        num_blocks: physical blocks of the pool; ids are `0 .. num_blocks - 1`.
        block_size: tokens per block.
        version: changes whenever the answer to a match may change (insert, remove, clear, and a
            step that ends the freshness of blocks). The key of match memos.
        position_offsets: int32 `[num_blocks, block_size]`: of each token of each block, how far
            the images in front of it hold its number back (`plan/images.py`); None: there was
            no image yet.
        step: number of the current step, from 1. It begins anew after 2**32 - 1 steps: a block that
            has stayed for exactly as long is then fresh for one step, that is, no donor in it.
        contexts: uint64 `[num_blocks]`, what each block was computed behind (`contexts.py`).
        nodes: the entries; what `show` was not asked for may be missing.
        known: what namespaces know of blocks that others have computed.
        max_views: namespaces that have entries of such blocks at a time.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        owner_of: Callable[[int], Hashable] = lambda namespace: namespace,
    ) -> None:
        """Reserve `4 * block_size + 316` to `364` bytes per block; pages are touched when used.

        192 of them are for entries in further namespaces. Should those not suffice, the entries
        move to an array twice as large. The first image takes `4 * block_size` more.

        Args:
            num_blocks, block_size: see above.
            owner_of: whose a namespace is, which knows blocks that others have computed. If too
                much is known, owners who have the most give back what they used last longest ago.
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
        self.max_views = MAX_VIEWS
        self._owner_of = owner_of
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
        self.position_offsets: IntArray | None = None
        self.known = Known(self.num_blocks)
        self._shares = Shares(self._owner_of)
        # Namespaces that have views, the latest used last; `Known.changes` when they were made.
        self._shown: OrderedDict[int, int] = OrderedDict()
        self._orphans: dict[int, npt.NDArray[np.int64]] = {}  # by namespace without views

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
        facts: BlockFacts = _NEW,
    ) -> None:
        """Index consecutive full blocks of one sequence.

        A block that is not indexed yet is fresh until `begin_step`. One that is, with the same
        tokens, position and depth, is known in this namespace from now on, too, and as fresh as it
        was. In any other case the id was reused for other KV, and all that was known of it is
        replaced.

        Args:
            namespace: small non-negative integer (`NamespaceTable.intern`).
            block_ids: int32 `[n]`, physical blocks.
            tokens: int32 `[n * block_size]`.
            first_position: position of `tokens[0]` in the sequence.
            parent_block: physical block of the tokens just before `first_position`; -1: none or
                unknown. A block that is not indexed there, in this namespace, is taken for unknown.
            depths: provenance depth of all blocks, or of each `[n]`; at most
                `MAX_PROVENANCE_DEPTH`.
            facts: what else is known of them.

        Raises:
            ValueError: sizes disagree, or an id, namespace, position or depth is out of range.
        """
        namespace, first_position = int(namespace), int(first_position)
        block_ids = np.require(block_ids, np.int32, ("C", "W"))
        tokens = np.require(tokens, np.int32, ("C", "W"))
        self._check_size(block_ids, tokens)
        if not block_ids.size:
            return
        self._check_insert(namespace, block_ids, first_position, depths)
        self._note_position_offsets(block_ids, facts.position_offsets)
        self.show(namespace)
        self._reserve_views(int(np.count_nonzero(self._born[block_ids])))
        hashes = window_hashes(tokens, self.block_size)[:: self.block_size].copy()
        grown, changed, concerns_others, became = insert_blocks(
            self.nodes,
            self.tokens,
            self.heads,
            self.anchor_counts,
            self._population,
            self.spares,
            self.step if facts.fresh else (self.step - 2) % _STEPS + 1,
            namespace,
            salt_of(namespace),
            block_ids,
            tokens,
            hashes,
            window_anchors(tokens, self.block_size)[:: self.block_size].copy(),
            first_position,
            int(parent_block),
            np.full(block_ids.size, depths, DEPTH),
        )
        if concerns_others:
            self.known.evicted(block_ids[became == NEW].astype(np.int64))
            self._note_views(namespace, int(parent_block), block_ids, hashes, became == NEW_VIEW)
        self.contexts[block_ids] = 0 if facts.contexts is None else facts.contexts
        self._size += grown
        if changed:
            self._has_fresh |= facts.fresh
            self.version += 1

    def _note_position_offsets(
        self, block_ids: IntArray, position_offsets: IntArray | None
    ) -> None:
        if self.position_offsets is None and position_offsets is not None:
            self.position_offsets = _aligned_zeros(self.num_blocks * self.block_size, np.int32)
            self.position_offsets = self.position_offsets.reshape(self.num_blocks, self.block_size)
        if self.position_offsets is not None:
            self.position_offsets[block_ids] = (
                0 if position_offsets is None else position_offsets.reshape(-1, self.block_size)
            )

    def position_offsets_of(self, block_ids: IntArray) -> IntArray | None:
        """Lags of the tokens of blocks, int32 `[n * block_size]`; None: there was no image yet."""
        return None if self.position_offsets is None else self.position_offsets[block_ids].ravel()

    def is_text(self, block_id: int) -> bool:
        """Whether an indexed block holds text that no image stands in front of."""
        if self.position_offsets is None:
            return True
        return not self.position_offsets[block_id].any() and bool(
            (self.tokens[block_id] >= 0).all()
        )

    def image_tokens(self) -> IntArray:
        """Ids of the tokens of images in indexed blocks, int32 `[n]`. O(blocks)."""
        tokens = self.tokens[self._born[: self.num_blocks] != 0]
        return np.asarray(tokens[tokens < 0], np.int32)

    # What namespaces know of others.

    def show(self, namespace: int) -> None:
        """Let `nodes` have all entries of a namespace. To be called before they are looked for."""
        if not self.known.has(namespace):
            return
        self._shares.used(namespace)
        if self._shown.get(namespace) == self.known.changes:
            self._shown.move_to_end(namespace)
            return
        table = self.known.table(namespace)
        orphans = self._orphans.pop(namespace, np.empty((0, 2), np.int64))
        orphans[:, 1] = self.known.blocks_of(orphans[:, 1])
        self._reserve_views(len(table))
        arrays = self.nodes, self.tokens, self.heads, self.anchor_counts, self.spares
        add_views(*arrays, int(namespace), salt_of(namespace), table, orphans)
        self._make_room_for(namespace)

    def knows(self, namespace: int, block_id: int) -> bool:
        """Whether a block is known in a namespace. This is no use of what the namespace knows."""
        if self._born[block_id] == 0:
            return False
        if self.nodes["namespace"][block_id] == namespace:
            return True
        return bool((self.known.table(namespace)[:, 0] == block_id).any())

    def _note_views(
        self, namespace: int, parent: int, block_ids: IntArray, hashes: HashArray, is_new: BoolArray
    ) -> None:
        """Blocks got views in a namespace, which it keeps to know."""
        new = np.flatnonzero(is_new)
        if not new.size:
            return
        left = self.known.prune(namespace)
        keys = hashes.astype(np.uint32)
        for run in np.split(new, np.flatnonzero(np.diff(new) > 1) + 1):
            before = int(block_ids[run[0] - 1]) if run[0] else parent
            if not 0 <= before < self.num_blocks or self._born[before] == 0:
                before = -1
            self.known.add(namespace, before, self._key_of(before), block_ids[run], keys[run])
            left += 1
        self._shares.holds(namespace, left)
        self._make_room_for(namespace)
        most_blocks = max(MAX_KNOWN_PREFIXES, MAX_KNOWN_PER_BLOCK * self.num_blocks)
        while self._shares and (
            self.known.num_marks > MAX_KNOWN_PREFIXES or self.known.num_cells > most_blocks
        ):
            self._forget(self._shares.next())

    def _key_of(self, block: int) -> int:
        """Hash of the tokens of an indexed block, without a namespace's salt; of -1: 0."""
        if block < 0:
            return 0
        node = self.nodes[block]
        return int(node["key"]) ^ int(salt_of(int(node["namespace"])) & np.uint64(0xFFFFFFFF))

    def _make_room_for(self, namespace: int) -> None:
        """A namespace has views; those that were used longest ago are dropped for it."""
        self._shown[namespace] = self.known.changes
        self._shown.move_to_end(namespace)
        while len(self._shown) > self.max_views:
            self._hide(next(iter(self._shown)))

    def _hide(self, namespace: int) -> None:
        del self._shown[namespace]
        arrays = self.nodes, self.heads, self.anchor_counts, self.spares
        orphans = drop_views(*arrays, namespace, self.known.table(namespace))
        if len(orphans):
            self._orphans[namespace] = orphans

    def _forget(self, namespace: int) -> None:
        """A namespace knows nothing of others any more."""
        if namespace in self._shown:
            self._hide(namespace)
        self._orphans.pop(namespace, None)
        self.known.forget(namespace)
        if namespace in self._shares:
            self._shares.holds(namespace, 0)
        self.version += 1

    def _reserve_views(self, count: int) -> None:
        """Make room for further entries."""
        wanted = int(self.spares[UNUSED]) + count
        if wanted > self.nodes.size:
            grown = _aligned_zeros(max(wanted, 2 * self.nodes.size), NODE)
            grown[: self.nodes.size] = self.nodes
            self._set_nodes(grown)

    def _check_size(self, block_ids: IntArray, tokens: TokenArray) -> None:
        needed = block_ids.size * self.block_size
        if tokens.size != needed:
            raise ValueError(
                f"{block_ids.size} blocks of {self.block_size} tokens need {needed} tokens, got "
                f"{tokens.size}: pass full blocks only"
            )

    def _check_insert(
        self, namespace: int, block_ids: IntArray, position: int, depths: int | DepthArray
    ) -> None:
        # Reductions are most of what one block takes, and one comes with every answer's block.
        lowest, deepest = (
            (depths, depths) if isinstance(depths, int) else (int(depths.min()), int(depths.max()))
        )
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

        O(1) per block and namespace that has a view of it, of which there are few, amortised.

        Returns:
            How many were indexed.
        """
        arrays = self.nodes, self.heads, self.anchor_counts, self._population, self.spares
        gone = np.asarray(block_ids, np.int64)
        removed = remove_blocks(*arrays, gone, self.num_blocks)
        if removed:
            if self._shares:
                self.known.evicted(gone)
            self._size -= removed
            self.version += 1
        return removed

    def clear(self) -> None:
        """Forget everything."""
        self._allocate()
        self.version += 1

    def population(self, namespace: int) -> int:
        """Number of blocks known in a namespace. A namespace without any is forgotten."""
        own = int(self._population[namespace]) if namespace < self._population.size else 0
        known = self.known.count(namespace)
        if not own + known and self.known.has(namespace):
            self._forget(namespace)
        return own + known

    def missing(self, namespace: int, block_ids: IntArray) -> IntArray:
        """Indices, int32 and ascending, of the blocks of which `entries` knows none."""
        return np.flatnonzero(self.entries(namespace, block_ids) < 0).astype(np.int32)

    def entries(self, namespace: int, block_ids: IntArray) -> IntArray:
        """Rows of `nodes` that blocks have in a namespace; int32 `[n]`, -1: it does not know one.

        Args:
            block_ids: int32 `[n]`, each below `num_blocks`; negative ones are nobody's.
        """
        self.show(namespace)
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
