# SPDX-License-Identifier: Apache-2.0
"""What of the slots that were found on arrival may still be copied: pieces for the stretches of a
prompt in which no equal text was found."""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.assembly import BLOCK, DESTINATION, LENGTH, OFFSET, POSITION
from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import Nodes
from vllm_segreuse.cache.rolling_hash import TokenArray
from vllm_segreuse.plan import BoolArray, IntArray


@kernel
def fill(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    slots: IntArray,
    entries: IntArray,
    free: BoolArray,
    start: int,
    step: int,
    max_depth: int,
    min_run: int,
) -> tuple[IntArray, BoolArray, int]:
    """Pieces for the free positions; every token of them is compared with the donor's once more.

    Args:
        slots: int32 `[n]` of the positions from `start` on, -1: none.
        entries: int32 `[n]`, of their blocks in the prompt's namespace, -1: none any more.
        free: bool `[n]`, whether anything is wanted.
        step, max_depth: blocks of this step, and deeper ones, are no donors.
        min_run: tokens in a row from one sequence.

    Returns:
        Table `[pieces, 5]`; whether each is the first of a run, bool `[pieces]`; deepest
        provenance.
    """
    size = block_tokens.shape[1]
    pieces, begins = np.empty((slots.size, 5), np.int32), np.empty(slots.size, np.bool_)
    count, run, length = 0, 0, 0  # of the run under way: its first piece, its tokens
    depth = 0
    for i in range(slots.size + 1):
        holds = i < slots.size and free[i] and slots[i] >= 0 and entries[i] >= 0
        if holds:
            node = nodes[entries[i]]
            holds = (
                node.born != step
                and node.depth <= max_depth
                and block_tokens[node.block, slots[i] % size] == tokens[start + i]
            )
        follows = holds and length > 0 and slots[i] == slots[i - 1] + 1 and slots[i] % size > 0
        if follows:
            pieces[count - 1, LENGTH] += 1
            length += 1
            continue
        continues = (
            holds
            and length > 0
            and slots[i] % size == 0
            and slots[i - 1] % size == size - 1
            and nodes[entries[i]].parent == entries[i - 1]
        )
        if not continues and length > 0:  # the run is over
            if length < min_run:
                count = run
            else:
                for j in range(run, count):
                    depth = max(depth, nodes[entries[pieces[j, DESTINATION] - start]].depth)
            length = 0
        if holds:
            if length == 0:
                run = count
            node = nodes[entries[i]]
            pieces[count, DESTINATION], pieces[count, LENGTH] = start + i, 1
            pieces[count, BLOCK], pieces[count, OFFSET] = node.block, slots[i] % size
            pieces[count, POSITION] = node.position + slots[i] % size
            begins[count] = length == 0
            count += 1
            length += 1
    return pieces[:count].copy(), begins[:count].copy(), depth
