# SPDX-License-Identifier: Apache-2.0
"""The entries of the segment index and the links between them, as compiled loops.

An entry is one physical block as seen from one namespace. vLLM shares the blocks of a common
prefix between namespaces, so a block has one entry, or view, for each that knows its tokens. The
first lies under the block's own id: nothing is allocated for a block of one namespace, and its
eviction is a few writes. The others lie behind `num_blocks`, go when the first goes, and are there
for a few namespaces at a time (`known` remembers them all). Four kinds
of links run through the entries:

    block -> view -> view ...        the entries of one physical block, one per namespace
    bucket -> group -> group ...     groups of one hash bucket; a group is all entries with equal
                |                    (namespace, tokens), represented by one of them, its head
              twin <-> twin ...      the entries of a group, oldest first, in a ring
    parent -> child <-> child ...    the blocks that follow a block in the sequences it came from,
                                     within one namespace

A chain therefore only holds *different* contents, however often a popular passage is cached, and
unlinking is O(1) wherever an entry stands. A separate table counts the groups by the place of their
anchor (see `rolling_hash`), which rules out nearly all windows of a prompt in few cache misses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.rolling_hash import AnchorArray, HashArray, TokenArray
from vllm_segreuse.options.server import MAX_PROVENANCE_DEPTH

IntArray = npt.NDArray[np.int32]
Nodes = npt.NDArray[np.void]
CountArray = npt.NDArray[np.uint8]
DepthArray = npt.NDArray[np.signedinteger]
DEPTH = np.min_scalar_type(-MAX_PROVENANCE_DEPTH)  # int8

# 64 bytes: an entry is one cache line. -1 = no such entry; born = 0 = not in use, so that a new
# index is all zeros and untouched memory stays unallocated. What is the physical block's own is
# equal in all its entries: born, position, depth, anchor.
NODE = np.dtype(
    [
        ("key", np.uint32),  # hash of the tokens, salted by the namespace
        ("born", np.uint32),  # step of the block's first insertion
        ("namespace", np.int32),
        ("position", np.int32),  # of the block's first token in its sequence
        ("depth", np.int16),  # provenance: 0 = exact; at least as wide as DEPTH
        ("is_head", np.int16),  # stands in its bucket's chain, for its group
        ("anchor", np.uint32),  # of the tokens
        ("block", np.int32),  # the physical block; the row of its tokens
        ("next_view", np.int32),  # of the same block; of a free entry: the next free one
        ("next_group", np.int32),
        ("previous_group", np.int32),
        ("next_twin", np.int32),
        ("previous_twin", np.int32),
        ("parent", np.int32),
        ("first_child", np.int32),
        ("next_sibling", np.int32),
        ("previous_sibling", np.int32),
    ]
)
FULL = np.uint8(255)  # an anchor counter that stopped counting

# Namespaces that have views at a time, those that were looked into last. It bounds what an eviction
# costs; who knows a block without having a view of it is in `known`.
MAX_VIEWS = 16

# Where entries for further views come from, as an array: the first that was released, and the
# first that was never used.
RETURNED, UNUSED = 0, 1

# What an insertion made of a block.
NEW, NEW_VIEW = 1, 2

# Columns of the tables of `known`.
KNOWN_BLOCK, KNOWN_KEY, KNOWN_PARENT, KNOWN_CELL = range(4)


@kernel
def insert_blocks(
    nodes: Nodes,
    block_tokens: TokenArray,
    heads: IntArray,
    anchor_counts: CountArray,
    population: npt.NDArray[np.int64],
    spares: IntArray,
    step: int,
    namespace: int,
    salt: np.uint64,
    block_ids: IntArray,
    tokens: TokenArray,
    hashes: HashArray,
    anchors: AnchorArray,
    position: int,
    parent_block: int,
    depths: DepthArray,
) -> tuple[int, bool, bool, npt.NDArray[np.int8]]:
    """(by how much the number of indexed blocks grew, whether anything changed, whether blocks were
    replaced or got views, and of each block whether it is `NEW` or has a `NEW_VIEW`)."""
    grown, changed, concerns_others = 0, False, False
    became = np.zeros(block_ids.size, np.int8)
    block_size = block_tokens.shape[1]
    parent = -1
    if 0 <= parent_block < block_tokens.shape[0]:
        parent = find_entry(nodes, parent_block, namespace)
    for i in range(block_ids.size):
        block = block_ids[i]
        content = tokens[i * block_size : (i + 1) * block_size]
        node = nodes[block]
        if node.born != 0 and not (
            node.position == position
            and node.depth == depths[i]
            and _is_equal(block_tokens[block], content)
        ):
            remove_block(nodes, heads, anchor_counts, population, spares, block)
            grown -= 1
            concerns_others = True
        entry = find_entry(nodes, block, namespace)
        if entry >= 0:
            if nodes[entry].parent < 0:  # the parent it knew was evicted, and has come back
                changed |= _link_parent(nodes, entry, parent, block_size)
        else:
            if node.born == 0:
                entry = block
                node.born, node.position, node.depth = step, position, depths[i]
                node.anchor, node.next_view = anchors[i], -1
                block_tokens[block] = content
                grown += 1
                population[namespace] += 1
                became[i] = NEW
            else:
                entry = _new_view(nodes, spares, block)
                became[i] = NEW_VIEW
                concerns_others = True
            _fill_entry(nodes, entry, block, namespace, np.uint32(hashes[i] ^ salt))
            _link_group(nodes, block_tokens, heads, anchor_counts, entry)
            _link_parent(nodes, entry, parent, block_size)
            changed = True
        parent = entry
        position += block_size
    for i in range(block_ids.size if concerns_others else 0):
        # One that is there twice has been replaced since.
        if became[i] == NEW_VIEW and nodes[block_ids[i]].namespace == namespace:
            became[i] = NEW
    return grown, changed, concerns_others, became


@kernel
def remove_block(
    nodes: Nodes,
    heads: IntArray,
    anchor_counts: CountArray,
    population: npt.NDArray[np.int64],
    spares: IntArray,
    block: int,
) -> bool:
    """Drop all entries of a block; False if it was not indexed."""
    if nodes[block].born == 0:
        return False
    entry = block
    while entry >= 0:
        node = nodes[entry]
        following = node.next_view
        _unlink_family(nodes, entry)
        _unlink_group(nodes, heads, anchor_counts, entry)
        node.born = 0
        if entry == block:
            population[node.namespace] -= 1
        else:
            node.next_view = spares[RETURNED]
            spares[RETURNED] = entry
        entry = following
    return True


@kernel
def remove_blocks(
    nodes: Nodes,
    heads: IntArray,
    anchor_counts: CountArray,
    population: npt.NDArray[np.int64],
    spares: IntArray,
    block_ids: npt.NDArray[np.int64],
    num_blocks: int,
) -> int:
    """Drop all entries of blocks; how many of these were indexed. Other numbers are no blocks."""
    removed = 0
    for block in block_ids:
        if 0 <= block < num_blocks:
            removed += remove_block(nodes, heads, anchor_counts, population, spares, block)
    return removed


@kernel
def add_views(
    nodes: Nodes,
    block_tokens: TokenArray,
    heads: IntArray,
    anchor_counts: CountArray,
    spares: IntArray,
    namespace: int,
    salt: np.uint64,
    known: npt.NDArray[np.int64],
    orphans: npt.NDArray[np.int64],
) -> None:
    """Make the entries of what a namespace knows of blocks of others, as far as they are missing.

    Args:
        known: its table (`known.Known.table`).
        orphans: what `drop_views` has returned when they were dropped.
    """
    block_size = block_tokens.shape[1]
    for row in range(known.shape[0]):
        block = known[row, KNOWN_BLOCK]
        if block >= 0 and find_entry(nodes, block, namespace) < 0:
            entry = _new_view(nodes, spares, block)
            key = np.uint32(known[row, KNOWN_KEY]) ^ np.uint32(salt & np.uint64(0xFFFFFFFF))
            _fill_entry(nodes, entry, block, namespace, np.uint32(key))
            _link_group(nodes, block_tokens, heads, anchor_counts, entry)
    for row in range(known.shape[0]):
        block, parent = known[row, KNOWN_BLOCK], known[row, KNOWN_PARENT]
        if block >= 0 and parent >= 0:
            entry = find_entry(nodes, block, namespace)
            if nodes[entry].parent < 0:
                _link_parent(nodes, entry, find_entry(nodes, parent, namespace), block_size)
    for row in range(orphans.shape[0]):
        child, parent = orphans[row]
        node = nodes[child]
        if parent >= 0 and node.born != 0 and node.namespace == namespace and node.parent < 0:
            _link_parent(nodes, child, find_entry(nodes, parent, namespace), block_size)


@kernel
def drop_views(
    nodes: Nodes,
    heads: IntArray,
    anchor_counts: CountArray,
    spares: IntArray,
    namespace: int,
    known: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Drop the entries that `add_views` has made; the namespace's own blocks that followed one of
    them, with its cell, `[n, 2]`."""
    count = 0
    orphans = np.empty((known.shape[0], 2), np.int64)
    for row in range(known.shape[0]):
        block = known[row, KNOWN_BLOCK]
        if block < 0:
            continue
        before, entry = block, nodes[block].next_view
        while entry >= 0 and nodes[entry].namespace != namespace:
            before, entry = entry, nodes[entry].next_view
        if entry < 0:
            continue  # it is there twice, or the namespace's own
        child = nodes[entry].first_child
        while child >= 0:
            if nodes[child].block == child:
                if count == orphans.shape[0]:
                    more = np.empty((2 * count, 2), np.int64)
                    more[:count] = orphans
                    orphans = more
                orphans[count, 0], orphans[count, 1] = child, known[row, KNOWN_CELL]
                count += 1
            child = nodes[child].next_sibling
        nodes[before].next_view = nodes[entry].next_view
        _unlink_family(nodes, entry)
        _unlink_group(nodes, heads, anchor_counts, entry)
        nodes[entry].born = 0
        nodes[entry].next_view = spares[RETURNED]
        spares[RETURNED] = entry
    return orphans[:count].copy()


@kernel
def find_entry(nodes: Nodes, block: int, namespace: int) -> int:
    """The entry of a physical block in a namespace, or -1."""
    entry = block
    if nodes[entry].born == 0:
        return -1
    while entry >= 0 and nodes[entry].namespace != namespace:
        entry = nodes[entry].next_view
    return entry


@kernel
def find_entries(nodes: Nodes, block_ids: IntArray, namespace: int) -> IntArray:
    """`find_entry` of each id; -1 for one that is negative."""
    entries = np.full(block_ids.size, -1, np.int32)
    for i in range(block_ids.size):
        if block_ids[i] >= 0:
            entries[i] = find_entry(nodes, block_ids[i], namespace)
    return entries


@kernel
def find_ancestors(nodes: Nodes, entry: int, count: int) -> IntArray:
    """Blocks in front of an entry, in order; `count` at most."""
    blocks = np.empty(count, np.int32)
    at = count
    entry = nodes[entry].parent
    while entry >= 0 and at > 0:
        at -= 1
        blocks[at] = nodes[entry].block
        entry = nodes[entry].parent
    return blocks[at:].copy()


@kernel
def _new_view(nodes: Nodes, spares: IntArray, block: int) -> int:
    """A further entry of an indexed block, with what all its entries share."""
    entry = spares[RETURNED]
    if entry >= 0:
        spares[RETURNED] = nodes[entry].next_view
    else:
        entry = spares[UNUSED]
        spares[UNUSED] += 1
    node, first = nodes[entry], nodes[block]
    node.born, node.position, node.depth = first.born, first.position, first.depth
    node.anchor, node.next_view = first.anchor, first.next_view
    first.next_view = entry
    return int(entry)


@kernel
def _fill_entry(nodes: Nodes, entry: int, block: int, namespace: int, key: np.uint32) -> None:
    node = nodes[entry]
    node.key = key
    node.namespace = namespace
    node.block = block
    node.parent = -1
    node.first_child = -1
    node.next_sibling = -1
    node.previous_sibling = -1


@kernel
def _link_group(
    nodes: Nodes,
    block_tokens: TokenArray,
    heads: IntArray,
    anchor_counts: CountArray,
    entry: int,
) -> None:
    """Join the group of equal content at its end, or open one at the front of the bucket."""
    node = nodes[entry]
    bucket = node.key & np.uint32(heads.size - 1)
    head = heads[bucket]
    while head >= 0:
        other = nodes[head]
        if (
            other.key == node.key
            and other.namespace == node.namespace
            and _is_equal(block_tokens[other.block], block_tokens[node.block])
        ):
            last = other.previous_twin
            node.is_head = 0
            node.previous_twin = last
            node.next_twin = head
            nodes[last].next_twin = entry
            other.previous_twin = entry
            return
        head = other.next_group
    first = heads[bucket]
    node.is_head = 1
    node.next_twin = entry
    node.previous_twin = entry
    node.previous_group = -1
    node.next_group = first
    if first >= 0:
        nodes[first].previous_group = entry
    heads[bucket] = entry
    place = node.anchor & np.uint32(anchor_counts.size - 1)
    if anchor_counts[place] < FULL:  # a full counter stays full: it no longer knows
        anchor_counts[place] += np.uint8(1)


@kernel
def _is_equal(tokens: TokenArray, other: TokenArray) -> bool:
    difference = np.int32(0)
    for i in range(tokens.size):  # no early exit: vectorises
        difference |= tokens[i] ^ other[i]
    return bool(difference == 0)


@kernel
def _unlink_group(nodes: Nodes, heads: IntArray, anchor_counts: CountArray, entry: int) -> None:
    node = nodes[entry]
    heir = node.next_twin
    nodes[heir].previous_twin = node.previous_twin
    nodes[node.previous_twin].next_twin = heir
    if node.is_head == 0:
        return
    before, after = node.previous_group, node.next_group
    if heir != entry:  # the next oldest twin takes the head's place in the chain
        nodes[heir].is_head = 1
        nodes[heir].previous_group = before
        nodes[heir].next_group = after
        before_next, after_previous = heir, heir
    else:
        before_next, after_previous = after, before
    bucket = node.key & np.uint32(heads.size - 1)
    if before >= 0:
        nodes[before].next_group = before_next
    else:
        heads[bucket] = before_next
    if after >= 0:
        nodes[after].previous_group = after_previous
    if heir == entry:
        place = node.anchor & np.uint32(anchor_counts.size - 1)
        if anchor_counts[place] < FULL:
            anchor_counts[place] -= np.uint8(1)


@kernel
def _link_parent(nodes: Nodes, entry: int, parent: int, block_size: int) -> bool:
    """Become the parent's first child, if it can be one: same namespace, just before.

    Positions grow along the links, so they have no cycle.
    """
    if parent < 0:
        return False
    node, above = nodes[entry], nodes[parent]
    if above.born == 0 or above.position + block_size != node.position:
        return False
    node.parent = parent
    node.next_sibling = above.first_child
    if above.first_child >= 0:
        nodes[above.first_child].previous_sibling = entry
    above.first_child = entry
    return True


@kernel
def _unlink_family(nodes: Nodes, entry: int) -> None:
    """Leave the parent, and orphan the children: the id will be reused for other content."""
    node = nodes[entry]
    if node.previous_sibling >= 0:
        nodes[node.previous_sibling].next_sibling = node.next_sibling
    elif node.parent >= 0:
        nodes[node.parent].first_child = node.next_sibling
    if node.next_sibling >= 0:
        nodes[node.next_sibling].previous_sibling = node.previous_sibling
    child = node.first_child
    while child >= 0:
        following = nodes[child].next_sibling
        nodes[child].parent = -1
        nodes[child].next_sibling = -1
        nodes[child].previous_sibling = -1
        child = following
