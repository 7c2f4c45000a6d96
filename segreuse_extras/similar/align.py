# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt are equal to which of a similar donor: a diff whose runs are long
enough to be reused.

    prompt   { "price" :  1 2 , "at" : ...       the equal runs, none shorter than `min_run`,
    donor    { "price" :  9 7 3 , "at" : ...     that together hold most tokens and are in the same
             ----------         -------          order in both
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import Nodes
from vllm_segreuse.cache.rolling_hash import TokenArray
from vllm_segreuse.plan import IntArray

MAX_RUNS = 96  # of one candidate; more only where a text repeats itself
_VISITED = 32  # places of a donor at which one stretch of the prompt is compared

# Columns of the table of candidates.
BEGIN, END, ENTRY, LENGTH = range(4)
# Columns of the table of runs.
PROMPT, DONOR, TOKENS = range(3)


@kernel
def donor_slots(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    candidates: IntArray,
    min_run: int,
    min_context: int,
) -> IntArray:
    """For each token of a prompt the slot of an equal one; int32 `[n]`, -1: none.

    Args:
        tokens: int32 `[n]`.
        candidates: int32 `[candidates, 4]`, the best first: begin and end in the prompt, entry of
            the donor's last block, tokens up to its end.
        min_run: tokens in a row.
        min_context: tokens in front of each that must be equal as well, one by one.
    """
    size = block_tokens.shape[1]
    slots = np.full(tokens.size, -1, np.int32)
    for row in range(candidates.shape[0]):
        donor = _sequence(nodes, size, candidates[row, ENTRY], candidates[row, LENGTH])
        text = np.empty(donor.size, np.int32)
        for i in range(donor.size):
            text[i] = block_tokens[donor[i] // size, donor[i] % size]
        begin, end = candidates[row, BEGIN], candidates[row, END]
        runs = equal_runs(tokens[begin:end], text, min_run)
        for run in range(runs.shape[0]):
            first = begin + runs[run, PROMPT]
            for i in range(min_context, runs[run, TOKENS]):
                if slots[first + i] < 0:
                    slots[first + i] = donor[runs[run, DONOR] + i]
    return slots


@kernel
def _sequence(nodes: Nodes, size: int, entry: int, length: int) -> IntArray:
    """Slots of the last `length` tokens of a sequence that ends with a block; fewer if blocks in
    front of it are gone."""
    slots = np.empty(length, np.int32)
    at = length
    while entry >= 0 and at > 0:
        for offset in range(size - 1, -1, -1):
            if at == 0:
                break
            at -= 1
            slots[at] = nodes[entry].block * size + offset
        entry = nodes[entry].parent
    return slots[at:]


@kernel
def equal_runs(prompt: TokenArray, donor: TokenArray, min_run: int) -> IntArray:
    """Equal runs in the same order in both, with most tokens together.

    Returns:
        int32 `[runs, 3]`: begin in the prompt, begin in the donor, tokens; the prompt's order.
    """
    runs = _maximal_runs(prompt, donor, min_run)
    count = runs.shape[0]
    tokens, before = np.empty(count, np.int32), np.empty(count, np.int32)
    last = -1
    for i in range(count):  # the best chain that ends with each run
        tokens[i], before[i] = runs[i, TOKENS], -1
        for j in range(i):
            overlap = max(  # all of the run, where it is in front of the other
                0,
                runs[j, PROMPT] + runs[j, TOKENS] - runs[i, PROMPT],
                runs[j, DONOR] + runs[j, TOKENS] - runs[i, DONOR],
            )
            gain = tokens[j] + runs[i, TOKENS] - overlap
            if overlap < runs[i, TOKENS] and gain > tokens[i]:
                tokens[i], before[i] = gain, j
        if last < 0 or tokens[i] > tokens[last]:
            last = i
    chain = np.empty((count, 3), np.int32)
    at = count
    while last >= 0:
        at -= 1
        chain[at] = runs[last]
        last = before[last]
    return chain[at:]


@kernel
def _maximal_runs(prompt: TokenArray, donor: TokenArray, min_run: int) -> IntArray:
    """Runs that cannot be longer at either end, by their begin in the prompt."""
    runs = np.empty((MAX_RUNS, 3), np.int32)
    if donor.size < min_run:
        return runs[:0]
    heads = np.full(donor.size, -1, np.int32)
    following = np.empty(donor.size, np.int32)
    for i in range(donor.size - min_run, -1, -1):
        bucket = _bucket(donor, i, min_run, heads.size)
        following[i], heads[bucket] = heads[bucket], i
    count = 0
    for i in range(prompt.size - min_run + 1):
        at, visits = heads[_bucket(prompt, i, min_run, heads.size)], _VISITED
        while at >= 0 and visits > 0 and count < MAX_RUNS:
            if i == 0 or at == 0 or prompt[i - 1] != donor[at - 1]:
                limit, length = min(prompt.size - i, donor.size - at), 0
                while length < limit and prompt[i + length] == donor[at + length]:
                    length += 1
                if length >= min_run:
                    runs[count, PROMPT], runs[count, DONOR], runs[count, TOKENS] = i, at, length
                    count += 1
            at = following[at]
            visits -= 1
    return runs[:count]


@kernel
def _bucket(tokens: TokenArray, begin: int, length: int, buckets: int) -> int:
    value = np.uint32(0)
    for i in range(begin, begin + length):
        value = np.uint32(np.uint32(value ^ np.uint32(tokens[i])) * np.uint32(0x9E3779B1))
        value ^= value >> np.uint32(16)
    return int(value % np.uint32(buckets))
