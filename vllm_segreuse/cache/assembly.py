# SPDX-License-Identifier: Apache-2.0
"""Which blocks are copied: the windows that were found, put together to runs, as compiled loops.

Each run begins with a choice of its donor, by the order that `matcher.find_matches` documents:

    _find_candidates -> _keep_longest_context -> _best_candidate

They stay in one file because a kernel only calls kernels of its own (see `jit.kernel`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import IntArray, Nodes
from vllm_segreuse.cache.rolling_hash import HashArray, TokenArray
from vllm_segreuse.plan import BoolArray

WorkArray = npt.NDArray[np.int64]

# Bounds of the work per choice. A passage cached more often than this loses nothing but the
# chance of a still better donor.
MAX_CANDIDATES = 32  # eligible donors compared
MAX_VISITED = 8 * MAX_CANDIDATES  # entries looked at, eligible or not
MAX_CONTEXT_TOKENS = 1024  # left context compared
MAX_ANCESTORS = 64  # blocks in front of a donor looked for in the prompt

# Bound of the work of all choices of a prompt: entries visited and compared, blocks compared and
# looked for, at about 15 ns each. Behind it the oldest donor is taken, and none is compared.
MAX_WORK = 128 * MAX_CANDIDATES * MAX_ANCESTORS

# Groups whose first donor is remembered; a power of two. Repetitive text has few contents, and
# asks for each of them at every window.
MAX_KNOWN = 4096

# Columns of the table that the loops below fill; see `Pieces`.
DESTINATION, LENGTH, BLOCK, OFFSET, POSITION = range(5)
# Columns of the table of candidates.
ENTRY, WINDOW = range(2)
# Columns of the table of groups that are known, by the lowest bits of their heads.
HEAD, DONOR = range(2)


@kernel
def assemble(
    nodes: Nodes,
    block_tokens: TokenArray,
    groups: IntArray,
    tokens: TokenArray,
    hashes: HashArray,
    salt: np.uint64,
    start: int,
    stop: int,
    step: int,
    max_depth: int,
    work: WorkArray,
) -> tuple[IntArray, BoolArray, int]:
    """Of `matcher.Matches` the pieces, as a table `[n, 5]` and where segments begin, `[n]`; and the
    depth.

    Walks entries of one namespace, whose links never leave it.

    Args:
        work: int64 `[1]`, what choices may still take of `MAX_WORK`; counted down, and may end a
            little below 0.
    """
    block_size = block_tokens.shape[1]
    pieces = np.empty((stop - start, 5), np.int32)
    table = np.empty(0, np.int32)  # `_tabulate`, at the first choice that needs it
    known = np.full((MAX_KNOWN, 2), -1, np.int32)
    count, position = 0, start
    while position < stop:
        candidates = _find_candidates(
            nodes, groups, block_size, position, step, max_depth, known, work
        )
        if candidates.shape[0] == 0:
            break
        best = 0
        if candidates.shape[0] > 1:
            candidates, is_whole = _keep_longest_context(
                nodes, block_tokens, tokens, candidates, work
            )
            if candidates.shape[0] > 1:
                if table.size == 0:
                    probed = start - block_size + 1
                    table = _tabulate(tokens, hashes, salt, groups, probed, block_size)
                best = _best_candidate(
                    nodes, block_tokens, tokens, hashes, salt, table, candidates, is_whole, work
                )
        donor, window = candidates[best, ENTRY], candidates[best, WINDOW]
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
    begins, depth = np.empty(count, np.bool_), 0
    for i in range(count):
        depth = max(depth, nodes[pieces[i, BLOCK]].depth)
        begins[i] = i == 0 or not _continues(nodes, pieces, i)
    for i in range(count):  # the caller knows blocks, not entries
        pieces[i, BLOCK] = nodes[pieces[i, BLOCK]].block
    return pieces[:count].copy(), begins, depth


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
def _find_candidates(
    nodes: Nodes,
    groups: IntArray,
    block_size: int,
    position: int,
    step: int,
    max_depth: int,
    known: IntArray,
    work: WorkArray,
) -> IntArray:
    """The next donors, `[n, 2]`: entries, and the windows that they equal. n = 0: there is none.

    First those of `_first_window`; of these only the first if no work is left. Then those of the
    windows less than a block behind it, in whose sequences the text was at another offset in its
    block. The block before such a donor must be one, too: if its left context is as long, the two
    serve all that the first window would.
    """
    candidates = np.empty((MAX_CANDIDATES, 2), np.int32)
    count, visits = 0, MAX_VISITED
    first = _first_window(nodes, groups, block_size, position, step, max_depth, known, work)
    if first < 0:
        return candidates[:0]
    if work[0] <= 0:
        donor = _first_donor(nodes, groups[first], step, max_depth, known, work)
        candidates[0, ENTRY], candidates[0, WINDOW] = donor, first
        return candidates[:1]
    for window in range(first, min(first + block_size, groups.size)):
        twin = head = groups[window]
        while twin >= 0 and visits > 0 and count < MAX_CANDIDATES:
            parent = nodes[twin].parent
            if _is_eligible(nodes, twin, step, max_depth) and (
                window == first or (parent >= 0 and _is_eligible(nodes, parent, step, max_depth))
            ):
                candidates[count, ENTRY], candidates[count, WINDOW] = twin, window
                count += 1
            visits -= 1
            twin = nodes[twin].next_twin
            if twin == head:
                break
    work[0] -= MAX_VISITED - visits
    return candidates[:count]


@kernel
def _first_window(
    nodes: Nodes,
    groups: IntArray,
    block_size: int,
    position: int,
    step: int,
    max_depth: int,
    known: IntArray,
    work: WorkArray,
) -> int:
    """The next window with an eligible donor, or -1.

    First the windows that cover `position`, the one that reaches furthest right before the
    others; then the windows behind it.
    """
    for window in range(min(position, groups.size - 1), max(-1, position - block_size), -1):
        head = groups[window]
        if head >= 0 and _first_donor(nodes, head, step, max_depth, known, work) >= 0:
            return window
    for window in range(position + 1, groups.size):
        head = groups[window]
        if head >= 0 and _first_donor(nodes, head, step, max_depth, known, work) >= 0:
            return window
    return -1


@kernel
def _first_donor(
    nodes: Nodes, head: int, step: int, max_depth: int, known: IntArray, work: WorkArray
) -> int:
    """The first eligible entry of a group, or -1.

    Args:
        known: heads and donors of groups that were asked for, `[MAX_KNOWN, 2]`; -1: none was.
    """
    slot = head & (MAX_KNOWN - 1)
    if known[slot, HEAD] == head:
        return int(known[slot, DONOR])
    twin, donor = head, -1
    for _ in range(MAX_VISITED):
        work[0] -= 1
        if _is_eligible(nodes, twin, step, max_depth):
            donor = twin
            break
        twin = nodes[twin].next_twin
        if twin == head:
            break
    known[slot, HEAD], known[slot, DONOR] = head, donor
    return donor


@kernel
def _keep_longest_context(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    candidates: IntArray,
    work: WorkArray,
) -> tuple[IntArray, bool]:
    """The candidates whose equal left context begins first in the prompt; and whether all is equal
    that is in front of them, as far as it is compared."""
    floor = max(0, candidates[0, WINDOW] - MAX_CONTEXT_TOKENS)
    begins = np.empty(candidates.shape[0], np.int32)
    for i in range(candidates.shape[0]):
        entry, window = candidates[i, ENTRY], candidates[i, WINDOW]
        begins[i] = _context_start(nodes, block_tokens, tokens, entry, window, floor)
        work[0] -= 1 + (window - begins[i]) // block_tokens.shape[1]
    earliest = begins.min()
    return candidates[begins == earliest], earliest == floor


@kernel
def _context_start(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    entry: int,
    window: int,
    floor: int,
) -> int:
    """From where to `window` the prompt equals what is left of an entry, eligible or not."""
    parent = nodes[entry].parent
    while parent >= 0 and window > floor:
        equal = _equal_suffix(block_tokens, nodes[parent].block, tokens, window, window - floor)
        window -= equal
        if equal < block_tokens.shape[1]:
            break
        parent = nodes[parent].parent
    return window


@kernel
def _best_candidate(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    hashes: HashArray,
    salt: np.uint64,
    table: IntArray,
    candidates: IntArray,
    is_whole: bool,
    work: WorkArray,
) -> int:
    """Row of the candidate to copy from, among those with equal left context; see `find_matches`.

    Args:
        table: `_tabulate` of this prompt.
        is_whole: whether nothing else is in front of those that are in place.
    """
    shared = _count_shared(nodes, block_tokens, tokens, hashes, salt, table, candidates, work)
    work[0] -= candidates.shape[0]
    best = 0
    for i in range(1, candidates.shape[0]):
        rank = _rank(nodes, candidates[i], shared[i], is_whole)
        if rank > _rank(nodes, candidates[best], shared[best], is_whole):
            best = i
    return best


@kernel
def _rank(
    nodes: Nodes, candidate: IntArray, shared: int, is_whole: bool
) -> tuple[int, int, int, int, int]:
    """What candidates with equal left context are compared by; the larger one is better."""
    node = nodes[candidate[ENTRY]]
    shift = int(node.position - candidate[WINDOW])
    in_place = int(is_whole and shift == 0)
    return in_place, int(shared), -int(node.depth), shift, -int(node.block)


@kernel
def _count_shared(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    hashes: HashArray,
    salt: np.uint64,
    table: IntArray,
    candidates: IntArray,
    work: WorkArray,
) -> IntArray:
    """Blocks in front of each candidate whose content is anywhere in the prompt; int32 `[n]`.

    One block of each candidate after the other, so that no load waits for that before it.
    """
    count, size = candidates.shape[0], block_tokens.shape[1]
    text = block_tokens.reshape(-1)
    ancestors, shared = np.empty(count, np.int32), np.zeros(count, np.int32)
    for i in range(count):
        ancestors[i] = nodes[candidates[i, ENTRY]].parent
    for _ in range(MAX_ANCESTORS):
        for i in range(count):
            entry = ancestors[i]
            if entry >= 0:
                work[0] -= 1
                key, begin = nodes[entry].key, nodes[entry].block * size
                slot = _find_slot(table, tokens, hashes, salt, key, text, begin, size)
                shared[i] += table[slot] >= 0
                ancestors[i] = nodes[entry].parent
    return shared


@kernel
def _tabulate(
    tokens: TokenArray,
    hashes: HashArray,
    salt: np.uint64,
    groups: IntArray,
    probed: int,
    block_size: int,
) -> IntArray:
    """One window of each content of the prompt that may be indexed, as an open hash table by key.

    Of the windows that were looked up, from `probed` to the end of `groups`, those with a group.
    """
    size = 2
    while size < 2 * hashes.size:
        size *= 2
    table = np.full(size, -1, np.int32)
    for window in range(hashes.size):
        if not probed <= window < groups.size or groups[window] >= 0:
            key = np.uint32(hashes[window] ^ salt)
            slot = _find_slot(table, tokens, hashes, salt, key, tokens, window, block_size)
            table[slot] = window
    return table


@kernel
def _find_slot(
    table: IntArray,
    tokens: TokenArray,
    hashes: HashArray,
    salt: np.uint64,
    key: np.uint32,
    text: TokenArray,
    begin: int,
    size: int,
) -> int:
    """Where a window with the `size` tokens of `text` from `begin` on is in `_tabulate`'s table, or
    else belongs."""
    slot = int(key) & (table.size - 1)
    while table[slot] >= 0:
        window = table[slot]
        if np.uint32(hashes[window] ^ salt) == key and _is_equal(text, begin, tokens, window, size):
            break
        slot = (slot + 1) & (table.size - 1)
    return slot


@kernel
def _is_equal(text: TokenArray, begin: int, tokens: TokenArray, window: int, size: int) -> bool:
    difference = np.int32(0)
    for i in range(size):  # no early exit: vectorises
        difference |= text[begin + i] ^ tokens[window + i]
    return bool(difference == 0)


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
    best, best_rank, candidates = -1, (0, 0, 0), 0
    child = nodes[entry].first_child
    for _ in range(MAX_VISITED):
        if child < 0 or candidates == MAX_CANDIDATES:
            break
        if _is_eligible(nodes, child, step, max_depth):
            length, block = 0, nodes[child].block
            while length < limit and block_tokens[block, length] == tokens[position + length]:
                length += 1
            rank = length, -int(nodes[child].depth), -int(block)
            if rank > best_rank:
                best, best_rank = child, rank
            candidates += 1
        child = nodes[child].next_sibling
    return best, best_rank[0]
