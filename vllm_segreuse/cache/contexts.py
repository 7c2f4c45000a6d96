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
from vllm_segreuse.plan import IntArray

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
    """The same matches, whose pieces say which of them stand in the same context."""
    pieces = matches.pieces
    in_place = (pieces.destination == pieces.position) & (pieces.offset == 0)
    if not in_place.any():
        return matches
    here = np.flatnonzero(in_place)
    contexts = prompt.contexts(pieces.destination[here] // index.block_size)
    is_same = (contexts != UNKNOWN) & (contexts == index.contexts[pieces.block[here]])
    if not is_same.any():
        return matches
    in_context = np.zeros(len(pieces), np.bool_)
    in_context[here[is_same]] = True
    depth = index.nodes["depth"][pieces.block]
    deepest = int(np.max(depth - in_context, initial=0))
    return matches._replace(pieces=replace(pieces, in_context=in_context), max_depth=deepest)
