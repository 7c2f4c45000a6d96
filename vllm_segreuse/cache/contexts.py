# SPDX-License-Identifier: Apache-2.0
"""Which reused tokens stand behind the very text that they were computed behind.

conversation   | system | documents | question | answer | question ...
turn 1             prefix   moved      computed  computed
turn 2             prefix   moved      reused    reused    computed
same context                no         yes       yes

A block's context is everything in front of it, named by vLLM's chained hash of the block before it
(64 bits of a digest of that, keyed by this process: nobody can look for two texts of one name).
KV of a token whose context is the same is what it was when it was computed: computing it again, in
the same approximation of what is in front, would change nothing. So policies choose none of these
tokens, and what is computed behind them is no deeper than they are. A conversation that goes on
costs its new text, and what of it is moved.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray, IntArray, Pieces

ContextArray = npt.NDArray[np.uint64]

_SECRET = os.urandom(32)
UNKNOWN, NOTHING = 0, 1
"""Contexts of a block: not known, equal to no other; and of a sequence's first block."""


def contexts_of(hashes: Sequence[bytes], blocks: IntArray) -> ContextArray:
    """Contexts of some blocks of a request.

    Args:
        hashes: vLLM's chained hashes of the request's full blocks.
        blocks: int32 `[n]`, indices of blocks.
    """
    found = np.full(len(blocks), UNKNOWN, np.uint64)
    for i, block in enumerate(blocks.tolist()):
        if block == 0:
            found[i] = NOTHING
        elif block <= len(hashes):
            found[i] = max(_named(hashes[block - 1]), NOTHING + 1)
    return found


def _named(chained: bytes) -> int:
    digest = hashlib.blake2b(chained, digest_size=8, key=_SECRET).digest()
    return int.from_bytes(digest, "little")


def known_until(
    contexts: Callable[[IntArray], ContextArray], stop: int, block_size: int
) -> Callable[[IntArray], ContextArray]:
    """The same contexts, where they end at `stop` or in front of it; behind it, none is known.

    The hashes of a request that names compressed documents are those of their kept tokens as a
    text. What is computed behind a document was computed behind other KV.

    Args:
        contexts: of blocks, by their indices.
        stop: position of the first document.
        block_size: tokens per block.
    """

    def known(blocks: IntArray) -> ContextArray:
        return np.where(blocks * block_size <= stop, contexts(blocks), np.uint64(UNKNOWN))

    return known


def compared(matches: Matches, index: SegmentIndex, prompt: Prompt) -> Matches:
    """The same matches, whose pieces say how much of the text that they were computed behind is in
    front of them, and which of them stand in the very same context."""
    pieces = matches.pieces
    if not len(pieces):
        return matches
    same_context = _in_same_context(pieces, index, prompt)
    depth = index.nodes["depth"][pieces.block]
    deepest = int(np.max(depth - same_context, initial=0))
    kept = _kept_context(pieces, index, prompt)
    pieces = replace(pieces, in_context=same_context, kept=kept)
    return matches._replace(pieces=pieces, max_depth=deepest)


def _in_same_context(pieces: Pieces, index: SegmentIndex, prompt: Prompt) -> BoolArray:
    """bool `[n]`."""
    in_place = (pieces.destination == pieces.position) & (pieces.offset == 0)
    here = np.flatnonzero(in_place)
    contexts = prompt.contexts(pieces.destination[here] // index.block_size)
    in_place[here] = (contexts != UNKNOWN) & (contexts == index.contexts[pieces.block[here]])
    return np.asarray(in_place, np.bool_)


def _kept_context(pieces: Pieces, index: SegmentIndex, prompt: Prompt) -> IntArray:
    """int32 `[n]`: tokens in front of each piece that were in front of it where it was computed:
    the beginning that both texts share, and pieces of the same sequence.

    Known by blocks that are indexed yet: what is evicted counts as gone.
    """
    kept = np.zeros(len(pieces), np.int32)
    entries = index.entries(prompt.namespace, pieces.block)
    first = np.flatnonzero(pieces.starts)
    for begin, end in zip(first, [*first[1:], len(pieces)], strict=True):
        if entries[begin] < 0:
            continue
        position = int(pieces.position[begin] - pieces.offset[begin])
        ancestors = index.ancestors(int(entries[begin]), position // index.block_size)
        blocks = np.append(ancestors, pieces.block[begin])
        shared = _shared_beginning(blocks, position, index, prompt)
        earlier = slice(0, begin)
        of_it = np.isin(pieces.block[earlier], blocks) & (pieces.position[earlier] >= shared)
        before = shared + int(pieces.length[earlier][of_it].sum())
        kept[begin:end] = before + pieces.position[begin:end] - pieces.position[begin]
    return np.minimum(kept, np.minimum(pieces.position, pieces.destination))


def _shared_beginning(blocks: IntArray, last: int, index: SegmentIndex, prompt: Prompt) -> int:
    """Tokens that a prompt and a sequence begin with, in whole blocks.

    Args:
        blocks: of the sequence, one behind the other.
        last: position of the last one.
    """
    size = index.block_size
    numbers = np.arange(last // size - len(blocks) + 1, last // size + 1, dtype=np.int32)
    least, most = 0, int(np.searchsorted(numbers * size, len(prompt.tokens)))
    while least < most:  # a block has the same context as long as all before it have
        middle = (least + most) // 2
        (context,) = prompt.contexts(numbers[middle : middle + 1])
        if context != UNKNOWN and context == index.contexts[blocks[middle]]:
            least = middle + 1
        else:
            most = middle
    return int(numbers[least - 1]) * size if least else 0
