# SPDX-License-Identifier: Apache-2.0
"""Finds the segments of a prompt whose KV is cached, at any offset.

    prompt     . . . . a b c d e f g h i j . . .       '.': found nowhere
    donor      x x a b | c d e f | g h i j | z z       blocks of four tokens
    pieces             a b   one window hit (c d e f), grown left through the parent and right
                       c d e f    through the children, down to single tokens
                       g h i j

Two passes: `lookup.find_groups` probes every window, then `assembly.assemble` walks the hits from
left to right and picks donors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.assembly import MAX_WORK, assemble
from vllm_segreuse.cache.index import SegmentIndex, salt_of
from vllm_segreuse.cache.kept import kept_context
from vllm_segreuse.cache.lookup import find_groups
from vllm_segreuse.cache.rolling_hash import (
    HashArray,
    TokenArray,
    window_anchors,
    window_hashes,
)
from vllm_segreuse.plan import IntArray, Pieces


class Matches(NamedTuple):
    """What of a prompt can be copied from where.

    Attributes:
        pieces: the copies.
        num_tokens: tokens covered.
        num_segments: maximal runs, contiguous in the prompt and in the donor's sequence.
        max_depth: deepest provenance used; 0 if only exact blocks are. Of blocks in the same
            context (`contexts.py`) it is one less than theirs: nothing was moved once more.
    """

    pieces: Pieces
    num_tokens: int
    num_segments: int
    max_depth: int

    @classmethod
    def of(cls, pieces: Pieces, max_depth: int = 0) -> Matches:
        """All of these pieces."""
        return cls(pieces, pieces.num_tokens, len(pieces.segments(0).first), max_depth)

    def merged(self, others: Matches) -> Matches:
        """These and others, which go to other positions."""
        return Matches(
            self.pieces.merged(others.pieces),
            self.num_tokens + others.num_tokens,
            self.num_segments + others.num_segments,
            max(self.max_depth, others.max_depth),
        )


NOTHING = Matches.of(Pieces.from_table([]))


def find_matches(
    index: SegmentIndex,
    namespace: int,
    tokens: TokenArray,
    hashes: HashArray,
    start: int,
    stop: int,
    max_depth: int,
) -> Matches:
    """Cover `[start, stop)` of a prompt with cached segments, from left to right.

    Every window of a block's size is looked up, and verified by namespace and tokens. Fresh blocks
    and blocks deeper than `max_depth` are never donors. Where several donors fit, wherever the text
    is in their blocks, they are compared by these, in this order:

    1. It continues the run in its own sequence.
    2. The longest equal left context, `MAX_CONTEXT_TOKENS` at most. Where all that is in front is
       equal, so is the KV: of donors that have as much, those come first that are in their place.
    3. The most blocks in front of it, among the last `MAX_ANCESTORS`, whose content is anywhere in
       the prompt. A document read behind other documents of the prompt, in whatever order, is far
       nearer than one read alone or behind unrelated text.
    4. The lower provenance depth. Approximations in what is in front are assumed to cost less than
       a context that is missing; this has not been measured.
    5. The larger position: more text in front, though unrelated, is no worse than none.
    6. The lower block id, so that the choice is always the same.

    Once choices have taken `MAX_WORK`, as in repetitive text, the oldest of the donors is taken.
    Children of one block have the same blocks in front, so that 3 and 5 do not tell them apart.
    Tokens outside of `[start, stop)` count as context, and as the prompt's content.

    Args:
        tokens: int32 `[prompt]`.
        hashes: `window_hashes(tokens, index.block_size)`, computed once per prompt.
        start: first destination to match, usually the end of vLLM's own prefix hit.
        stop: end of the destinations, usually the last token of the prompt.
        max_depth: largest provenance depth of a donor.

    Raises:
        ValueError: `hashes` do not belong to `tokens`, or the range is outside of the prompt.
    """
    if hashes.size != max(0, tokens.size - index.block_size + 1):
        raise ValueError(
            f"{hashes.size} hashes for {tokens.size} tokens and blocks of {index.block_size}: "
            "pass window_hashes(tokens, index.block_size)"
        )
    if not 0 <= start <= stop <= tokens.size:
        raise ValueError(f"[{start}, {stop}) is not a range of a prompt of {tokens.size} tokens")
    # One type per argument, one compiled kernel: a read-only view or numpy's own integers would
    # compile another.
    namespace, start, stop, max_depth = int(namespace), int(start), int(stop), int(max_depth)
    tokens = np.require(tokens, np.int32, ("C", "W"))
    hashes, salt = np.require(hashes, np.uint64, ("C", "W")), salt_of(namespace)
    groups = indexed_windows(index, namespace, tokens, hashes, start, stop)
    table, begins, depth = assemble(
        index.nodes,
        index.tokens,
        groups,
        tokens,
        hashes,
        salt,
        start,
        stop,
        index.step,
        max_depth,
        np.full(1, MAX_WORK, np.int64),
    )
    pieces = Pieces.from_table(table, begins=begins)
    return Matches.of(_with_kept(pieces, index, namespace, tokens), depth)


def _with_kept(pieces: Pieces, index: SegmentIndex, namespace: int, tokens: TokenArray) -> Pieces:
    """The same pieces, which say how much of their context is in front of them."""
    kept = kept_context(
        index.nodes,
        index.tokens,
        tokens,
        index.entries(namespace, pieces.block),
        pieces.destination,
        pieces.length,
        pieces.position,
        pieces.starts,
    )
    return replace(pieces, kept=kept)


def indexed_windows(
    index: SegmentIndex,
    namespace: int,
    tokens: TokenArray,
    hashes: HashArray,
    start: int,
    stop: int,
) -> IntArray:
    """Which windows of a prompt are the content of indexed blocks, donors or not.

    Args:
        tokens, hashes, start, stop: as of `find_matches`; arrays contiguous and writable.

    Returns:
        See `lookup.find_groups`.
    """
    index.show(namespace)
    return find_groups(
        index.nodes,
        index.tokens,
        index.heads,
        index.anchor_counts,
        namespace,
        salt_of(namespace),
        tokens,
        hashes,
        window_anchors(tokens, index.block_size),
        start,
        stop,
    )


def warm_up() -> None:
    """Compile, or load from the disk cache, everything a request will need."""
    index = SegmentIndex(num_blocks=2, block_size=2)
    tokens = np.arange(4, dtype=np.int32)
    blocks = np.arange(2, dtype=np.int32)
    index.max_views = 1
    for namespace in range(3):
        index.insert(namespace, blocks, tokens, first_position=0)
    index.begin_step()
    for namespace in range(2):  # the views of the second one were dropped
        find_matches(index, namespace, tokens, window_hashes(tokens, 2), 0, 4, 0)
    index.population(1)
    index.known.attach(index.known.detach(0), 0)
    index.remove([0])
