# SPDX-License-Identifier: Apache-2.0
"""Finds KV that carries nothing but text which is in front of it.

donor      S t a b c d e f           S: system prompt, t: a thought, a to f: blocks behind it
prompt     S   a b c d e f           refused: all of it was computed behind t
prompt     S t x a b c d e f         reused: x is new, and all that is in front of a is there

The KV of an exact block (provenance depth 0) is a function of the tokens up to its end in the
sequence that it was computed in. A piece of such a block is taken if all tokens in front of it
there are in front of it here, in their order. That is known without these tokens:

1. it is the beginning of its sequence; or
2. the prompt begins with the text in front of it: its context (`cache/contexts.py`) is that of the
   prompt's block of the same index, and so are the tokens of its own block that are in front; or
3. it goes on where a piece that was taken ends, in the same block or in that block's child.

What is left is refused, although it might be right: blocks of deeper provenance, since what they
were computed behind has a context of its own; similar text; and what was computed behind a block
that is evicted by now, unless the prompt begins with it.
"""

from __future__ import annotations

import numpy as np

from segreuse_extras.finder import FinderAround
from vllm_segreuse.cache.contexts import UNKNOWN
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray, Pieces


class SameContextFinder(FinderAround):
    """What another finder finds, but for KV that carries other text. One per request.

    Args:
        finder: the other one.
        index: that it searches.

    Attributes:
        found: by the last search, before anything was refused.
        refused: tokens of it that were not returned.
    """

    def __init__(self, finder: Finder, index: SegmentIndex) -> None:
        super().__init__(finder)
        self._index = index
        self.found = NOTHING
        self.refused = 0

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        found = self._finder.remembered(prompt, start, stop)
        return None if found is None else self._kept(prompt, found, start, stop)

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self._kept(prompt, self._finder.find(prompt, start, stop), start, stop)

    def _kept(self, prompt: Prompt, found: Matches, start: int, stop: int) -> Matches:
        kept = same_context(self._index, prompt, found.pieces)
        left: Matches | None = found
        if not kept.all():
            left = self._finder.part(prompt, found, kept, start, stop)
        left = NOTHING if left is None else left
        self.found, self.refused = found, found.num_tokens - left.num_tokens
        return left


def same_context(index: SegmentIndex, prompt: Prompt, pieces: Pieces) -> BoolArray:
    """bool `[n]`: pieces whose whole context is in front of them in the prompt.

    Args:
        index: whose blocks they are pieces of.
        prompt: that they were found for.
        pieces: ordered by destination.
    """
    kept = np.zeros(len(pieces), np.bool_)
    entries = index.entries(prompt.namespace, pieces.block)
    known = (entries >= 0) & ~pieces.is_similar & (index.nodes["depth"][entries] == 0)
    begins = _prompt_begins_with_context(index, prompt, pieces)
    covered: dict[int, int] = {}  # by block: where in its sequence what was taken of it ends
    for i in np.flatnonzero(known).tolist():
        block, position = int(pieces.block[i]), int(pieces.position[i])
        if not begins[i] and position > covered.get(block, -1):
            parent = int(index.nodes["parent"][entries[i]])
            before = -1 if parent < 0 else int(index.nodes["block"][parent])
            if pieces.offset[i] or covered.get(before, -1) < position:
                continue
        kept[i] = True
        covered[block] = max(covered.get(block, -1), position + int(pieces.length[i]))
    return kept


def _prompt_begins_with_context(index: SegmentIndex, prompt: Prompt, pieces: Pieces) -> BoolArray:
    """bool `[n]`: pieces with nothing in front of them, or what the prompt begins with."""
    first = pieces.position - pieces.offset  # of their blocks
    contexts = prompt.contexts(first // index.block_size)
    same = (contexts != UNKNOWN) & (contexts == index.contexts[pieces.block])
    same &= pieces.position <= pieces.destination
    for i in np.flatnonzero(same & (pieces.offset > 0)).tolist():
        offset = int(pieces.offset[i])
        own = index.tokens[pieces.block[i], :offset]
        same[i] = np.array_equal(own, prompt.tokens[first[i] : first[i] + offset])
    return same | (pieces.position == 0)
