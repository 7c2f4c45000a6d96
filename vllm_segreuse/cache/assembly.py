# SPDX-License-Identifier: Apache-2.0
"""Which blocks are copied: the windows that were found, put together to runs, as compiled loops."""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import IntArray, Nodes
from vllm_segreuse.cache.rolling_hash import TokenArray

# Bounds of the work per choice. A passage cached more often than this loses nothing but the
# chance of a still better donor.
MAX_CANDIDATES = 32  # eligible donors compared
MAX_VISITED = 8 * MAX_CANDIDATES  # entries looked at, eligible or not
MAX_CONTEXT_TOKENS = 1024  # left context compared

# Columns of the table that the loops below fill; see `Pieces`.
DESTINATION, LENGTH, BLOCK, OFFSET, POSITION = range(5)


@kernel
def assemble(
    nodes: Nodes,
    block_tokens: TokenArray,
    groups: IntArray,
    tokens: TokenArray,
    start: int,
    stop: int,
    step: int,
    max_depth: int,
) -> tuple[IntArray, int, int, int]:
    """The fields of `matcher.Matches`, its pieces as a table `[n, 5]`.

    Walks entries of one namespace, whose links never leave it.
    """
    block_size = block_tokens.shape[1]
    pieces = np.empty((stop - start, 5), np.int32)
    count, position = 0, start
    while position < stop:
        window, donor = _next_donor(nodes, block_tokens, groups, tokens, position, step, max_depth)
        if donor < 0:
            break
        if window > position:
            count = _grow_left(
                nodes, block_tokens, tokens, donor, window, position, step, max_depth, pieces, count
            )
            position = window
        # Inside of a run `position` is where the block of `donor` starts to be copied, at `offset`.
        offset = position - window
        length = min(block_size - offset, stop - position)
        while length > 0:
            count = _emit(nodes, pieces, count, position, length, donor, offset)
            position += length
            if offset + length < block_size:
                break
            offset = 0
            donor, length = _best_child(
                nodes, block_tokens, tokens, donor, position, stop, step, max_depth
            )
    num_tokens, num_segments, depth = 0, 0, 0
    for i in range(count):
        num_tokens += pieces[i, LENGTH]
        depth = max(depth, nodes[pieces[i, BLOCK]].depth)
        num_segments += i == 0 or not _continues(nodes, pieces, i)
    for i in range(count):  # the caller knows blocks, not entries
        pieces[i, BLOCK] = nodes[pieces[i, BLOCK]].block
    return pieces[:count].copy(), num_tokens, num_segments, depth


@kernel
def _continues(nodes: Nodes, pieces: IntArray, i: int) -> bool:
    """Whether piece i follows piece i - 1, both in the prompt and in the donor's sequence."""
    before, piece = pieces[i - 1], pieces[i]
    return bool(
        before[DESTINATION] + before[LENGTH] == piece[DESTINATION]
        and before[POSITION] + before[LENGTH] == piece[POSITION]
        and nodes[piece[BLOCK]].parent == before[BLOCK]
    )


@kernel
def _emit(
    nodes: Nodes,
    pieces: IntArray,
    count: int,
    destination: int,
    length: int,
    entry: int,
    offset: int,
) -> int:
    piece = pieces[count]
    piece[DESTINATION] = destination
    piece[LENGTH] = length
    piece[BLOCK] = entry  # until the links between pieces have been counted
    piece[OFFSET] = offset
    piece[POSITION] = nodes[entry].position + offset
    return count + 1


@kernel
def _is_eligible(nodes: Nodes, entry: int, step: int, max_depth: int) -> bool:
    return bool(nodes[entry].born != step and nodes[entry].depth <= max_depth)


@kernel
def _next_donor(
    nodes: Nodes,
    block_tokens: TokenArray,
    groups: IntArray,
    tokens: TokenArray,
    position: int,
    step: int,
    max_depth: int,
) -> tuple[int, int]:
    """(window, donor) of the next entry to copy from; donor -1 if there is none.

    First the windows that cover `position`, the one that reaches furthest right before the
    others; then the windows behind it.
    """
    block_size = block_tokens.shape[1]
    for window in range(position, max(-1, position - block_size), -1):
        if window < groups.size and groups[window] >= 0:
            donor = _best_twin(nodes, block_tokens, groups[window], tokens, window, step, max_depth)
            if donor >= 0:
                return window, donor
    for window in range(position + 1, groups.size):
        if groups[window] >= 0:
            donor = _best_twin(nodes, block_tokens, groups[window], tokens, window, step, max_depth)
            if donor >= 0:
                return window, donor
    return -1, -1


@kernel
def _best_twin(
    nodes: Nodes,
    block_tokens: TokenArray,
    head: int,
    tokens: TokenArray,
    window: int,
    step: int,
    max_depth: int,
) -> int:
    """The eligible twin of a group with the longest equal left context; -1 if none is eligible."""
    if nodes[head].next_twin == head:
        return head if _is_eligible(nodes, head, step, max_depth) else -1
    best, best_context, best_depth, best_block, candidates = -1, -1, 0, 0, 0
    twin = head
    for _ in range(MAX_VISITED):
        if _is_eligible(nodes, twin, step, max_depth):
            context = _left_context(nodes, block_tokens, tokens, twin, window)
            depth, block = nodes[twin].depth, nodes[twin].block
            if context > best_context or (
                context == best_context
                and (depth < best_depth or (depth == best_depth and block < best_block))
            ):
                best, best_context, best_depth, best_block = twin, context, depth, block
            candidates += 1
        twin = nodes[twin].next_twin
        if twin == head or candidates == MAX_CANDIDATES:
            break
    return best


@kernel
def _left_context(
    nodes: Nodes, block_tokens: TokenArray, tokens: TokenArray, entry: int, window: int
) -> int:
    """Tokens left of an entry that equal the prompt's left of `window`, eligible or not."""
    limit = min(window, MAX_CONTEXT_TOKENS)
    length = 0
    parent = nodes[entry].parent
    while parent >= 0 and length < limit:
        block = nodes[parent].block
        equal = _equal_suffix(block_tokens, block, tokens, window - length, limit - length)
        length += equal
        if equal < block_tokens.shape[1]:
            break
        parent = nodes[parent].parent
    return length


@kernel
def _equal_suffix(
    block_tokens: TokenArray, block: int, tokens: TokenArray, end: int, limit: int
) -> int:
    """Equal tokens of the block and of the prompt before `end`, from their ends leftwards."""
    block_size = block_tokens.shape[1]
    limit = min(limit, block_size)
    length = 0
    while length < limit and (
        block_tokens[block, block_size - 1 - length] == tokens[end - 1 - length]
    ):
        length += 1
    return length


@kernel
def _grow_left(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    donor: int,
    window: int,
    floor: int,
    step: int,
    max_depth: int,
    pieces: IntArray,
    count: int,
) -> int:
    """Emit the pieces that lead up to `window`, down to `floor` at most; returns the new count."""
    block_size = block_tokens.shape[1]
    first = count
    parent = nodes[donor].parent
    while parent >= 0 and window > floor and _is_eligible(nodes, parent, step, max_depth):
        block = nodes[parent].block
        length = _equal_suffix(block_tokens, block, tokens, window, window - floor)
        if length == 0:
            break
        window -= length
        count = _emit(nodes, pieces, count, window, length, parent, block_size - length)
        if length < block_size:
            break
        parent = nodes[parent].parent
    pieces[first:count] = pieces[first:count][::-1].copy()
    return count


@kernel
def _best_child(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    entry: int,
    position: int,
    stop: int,
    step: int,
    max_depth: int,
) -> tuple[int, int]:
    """(child, length) of the eligible child that equals the prompt longest; length 0: none."""
    limit = min(block_tokens.shape[1], stop - position)
    best, best_length, best_depth, best_block, candidates = -1, 0, 0, 0, 0
    child = nodes[entry].first_child
    for _ in range(MAX_VISITED):
        if child < 0 or candidates == MAX_CANDIDATES:
            break
        if _is_eligible(nodes, child, step, max_depth):
            length = 0
            depth, block = nodes[child].depth, nodes[child].block
            while length < limit and block_tokens[block, length] == tokens[position + length]:
                length += 1
            if length > best_length or (
                length == best_length
                and best >= 0
                and (depth < best_depth or (depth == best_depth and block < best_block))
            ):
                best, best_length, best_depth, best_block = child, length, depth, block
            candidates += 1
        child = nodes[child].next_sibling
    return best, best_length
