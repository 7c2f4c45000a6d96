# SPDX-License-Identifier: Apache-2.0
"""How much of the text that a piece was computed behind is in front of it, as a compiled loop.

donor      S t a b c d          t: a thought, say
prompt     S a b n c            in front of a: S; of b: S, a; of c: S, a, b. New: n; gone: t
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import IntArray, Nodes
from vllm_segreuse.cache.rolling_hash import TokenArray
from vllm_segreuse.plan import BoolArray

ENTRY, TAKEN = range(2)
"""Columns of the table of what was taken: of which entry, how many tokens."""


@kernel
def kept_context(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    entries: IntArray,
    destination: IntArray,
    length: IntArray,
    position: IntArray,
    starts: BoolArray,
) -> IntArray:
    """int32 `[n]`: tokens in front of each piece that were in front of it where it was computed:
    the blocks that both texts begin with, and earlier pieces of the same sequence.

    What is in front of an evicted block is not known to be the same.

    Args:
        entries: of the blocks that are copied from; -1: it is not indexed.
        destination, length, position: of the pieces, ordered by destination.
        starts: where segments begin.
    """
    size = block_tokens.shape[1]
    slots = 2
    while slots < 2 * entries.size:
        slots *= 2
    taken = np.zeros((slots, 2), np.int32)
    taken[:, ENTRY] = -1
    kept = np.zeros(entries.size, np.int32)
    for i in range(entries.size):
        if not starts[i]:
            kept[i] = kept[i - 1] + length[i - 1]
        elif entries[i] >= 0:
            chain = _chain(nodes, entries[i], position[i] // size)
            begin = _shared_blocks(nodes, block_tokens, tokens, chain, destination[i])
            found = begin * size
            for k in range(begin, chain.size):
                before = size if k < chain.size - 1 else position[i] % size
                found += min(before, taken[_slot(taken, chain[k]), TAKEN])
            kept[i] = min(found, position[i], destination[i])
        if entries[i] >= 0:
            slot = _slot(taken, entries[i])
            taken[slot, ENTRY] = entries[i]
            taken[slot, TAKEN] += length[i]
    return kept


@kernel
def _chain(nodes: Nodes, entry: int, count: int) -> IntArray:
    """An entry behind those in front of it in its sequence, `count` at most."""
    chain = np.empty(count + 1, np.int32)
    at = count
    chain[at] = entry
    while at > 0 and nodes[chain[at]].parent >= 0:
        at -= 1
        chain[at] = nodes[chain[at + 1]].parent
    return chain[at:]


@kernel
def _shared_blocks(
    nodes: Nodes, block_tokens: TokenArray, tokens: TokenArray, chain: IntArray, stop: int
) -> int:
    """Blocks that a sequence and the prompt up to `stop` begin with, but for the chain's last."""
    if nodes[chain[0]].position != 0:
        return 0
    size, shared = block_tokens.shape[1], 0
    while shared < chain.size - 1 and (shared + 1) * size <= stop:
        block = nodes[chain[shared]].block
        for k in range(size):
            if block_tokens[block, k] != tokens[shared * size + k]:
                return shared
        shared += 1
    return shared


@kernel
def _slot(taken: IntArray, entry: int) -> int:
    """Where an entry is in the table, or else belongs."""
    slot = entry & (taken.shape[0] - 1)
    while taken[slot, ENTRY] >= 0 and taken[slot, ENTRY] != entry:
        slot = (slot + 1) & (taken.shape[0] - 1)
    return int(slot)
