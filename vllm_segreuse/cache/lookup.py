# SPDX-License-Identifier: Apache-2.0
"""Which windows of a prompt are the content of indexed blocks: thousands of probes at once."""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import CountArray, IntArray, Nodes
from vllm_segreuse.cache.rolling_hash import AnchorArray, HashArray, TokenArray


@kernel
def find_groups(
    nodes: Nodes,
    block_tokens: TokenArray,
    heads: IntArray,
    anchor_counts: CountArray,
    namespace: int,
    salt: np.uint64,
    tokens: TokenArray,
    hashes: HashArray,
    anchors: AnchorArray,
    start: int,
    stop: int,
) -> IntArray:
    """Head (an entry) of the group with the content of each window reaching into `[start, stop)`.

    Returns int32 `[min(stop, windows)]`; -1: no group. Stage by stage over all windows rather than
    window by window: within a stage, no load waits for another.
    """
    block_size = block_tokens.shape[1]
    groups = np.full(max(0, min(hashes.size, stop)), -1, np.int32)
    windows = np.empty(groups.size, np.int32)
    first = max(0, start - block_size + 1)
    _touch_anchors(anchor_counts, anchors[first : groups.size])
    mask = np.uint32(anchor_counts.size - 1)
    count = 0
    # 1. Windows whose anchor is that of some group: the hits, and about one in thirty others.
    for window in range(first, groups.size):
        windows[count] = window
        count += anchor_counts[anchors[window] & mask] != 0
    # 2. The chains of their buckets.
    found = np.empty(count, np.int32)
    bucket_mask = np.uint64(heads.size - 1)
    for i in range(count):
        found[i] = heads[(hashes[windows[i]] ^ salt) & bucket_mask]
    # 3. Entries with their key.
    kept = 0
    for i in range(count):
        window, entry = windows[i], found[i]
        key = np.uint32(hashes[window] ^ salt)
        while entry >= 0 and nodes[entry].key != key:
            entry = nodes[entry].next_group
        windows[kept], found[kept] = window, entry
        kept += entry >= 0
    # 4. Keys prove nothing: namespace and tokens do.
    for i in range(kept):
        window, entry = windows[i], found[i]
        key = np.uint32(hashes[window] ^ salt)
        while entry >= 0 and not (
            nodes[entry].key == key
            and nodes[entry].namespace == namespace
            and _is_equal(block_tokens, nodes[entry].block, tokens, window)
        ):
            entry = nodes[entry].next_group
        groups[window] = entry
    return groups


@kernel
def _touch_anchors(anchor_counts: CountArray, anchors: AnchorArray) -> CountArray:
    """Load the counter at the start of each stretch of anchors, close together in time.

    A stretch is long enough to fill the processor's window of instructions in flight: going from
    one to the next in the probing loop itself would take the cache misses one by one.
    """
    starts = np.empty(anchors.size + 1, np.uint32)
    count, expected = 0, np.uint32(0)
    for i in range(anchors.size):
        starts[count] = anchors[i]
        count += anchors[i] != expected
        expected = anchors[i] - np.uint32(1)
    mask = np.uint32(anchor_counts.size - 1)
    touched = np.empty(count, np.uint8)
    for i in range(count):
        touched[i] = anchor_counts[starts[i] & mask]
    return touched


@kernel
def _is_equal(block_tokens: TokenArray, block: int, tokens: TokenArray, window: int) -> bool:
    difference = np.int32(0)
    for i in range(block_tokens.shape[1]):  # no early exit: vectorises
        difference |= block_tokens[block, i] ^ tokens[window + i]
    return bool(difference == 0)
