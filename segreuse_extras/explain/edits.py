# SPDX-License-Identifier: Apache-2.0
"""Where a prompt departs from an earlier one that it goes on with, and what was found behind.

earlier    S t t a b c d        the prompt's prefix ends behind S: t is gone, x is new
prompt     S x   a b c d        a to d were computed in a sequence that begins with S

Text in the prompt that is known from other sequences is new there, too. How much of the earlier
sequence is gone is said, and never which text: other users of the namespace may have sent it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.contexts import UNKNOWN
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import Pieces

_MOST_SEGMENTS = 64
"""Segments that are looked at: each costs a walk through its sequence."""


class Edit(NamedTuple):
    """One.

    Attributes:
        at: first token that is another one than in the earlier sequence, or stands elsewhere.
        gone_tokens: that stood there, in front of what was found again.
        new_tokens: that stand there now.
        found_tokens: behind, found at any position.
    """

    at: int
    gone_tokens: int
    new_tokens: int
    found_tokens: int


def edit_of(index: SegmentIndex, prompt: Prompt, pieces: Pieces, start: int) -> Edit | None:
    """The first edit of a prompt; None: nothing behind the prefix is known to go on with it.

    Args:
        index: whose blocks the pieces are of.
        prompt: that they were found for.
        pieces: what was found, ordered by destination.
        start: tokens of vLLM's own prefix hit.
    """
    at, numbers = start, pieces.segment
    ends = pieces.destination + pieces.length
    firsts = np.searchsorted(numbers, np.arange(_MOST_SEGMENTS))
    for number, i in enumerate(firsts[firsts < len(pieces)].tolist()):
        destination, position = int(pieces.destination[i]), int(pieces.position[i])
        end = int(ends[np.searchsorted(numbers, number, side="right") - 1])
        if destination == position <= at:
            at = end
            continue
        departs = _departs(index, prompt, pieces, i, at)
        if departs is None:
            continue
        if departs == position == destination:
            at = end
            continue
        found = int(pieces.length[i:].sum())
        return Edit(departs, position - departs, destination - departs, found)
    return None


def _departs(
    index: SegmentIndex, prompt: Prompt, pieces: Pieces, piece: int, at: int
) -> int | None:
    """Where a prompt departs from the sequence of a piece, in front of both; None: they do not
    begin alike, or that is not known.

    Args:
        at: in front of it, all is where it was. They are compared from its block on.
    """
    size = index.block_size
    destination, position = int(pieces.destination[piece]), int(pieces.position[piece])
    first, last = at // size, (position - int(pieces.offset[piece])) // size
    block = pieces.block[piece : piece + 1]
    [entry] = index.entries(prompt.namespace, block).tolist()
    if entry < 0 or position < at:  # what an earlier turn has moved is in no index
        return None
    blocks = np.append(index.ancestors(entry, last - first), block)
    if len(blocks) <= last - first:  # some of them are evicted
        return None
    contexts = prompt.contexts(np.array([first], np.int32))
    if contexts[0] == UNKNOWN or contexts[0] != index.contexts[blocks[0]]:
        return None
    stop = min(position, destination)
    here = prompt.tokens[first * size : stop]
    other = index.tokens[blocks].ravel()[: len(here)] != here
    departs = first * size + int(np.argmax(other)) if other.any() else stop
    # All chats of a model begin with a few tokens of its template.
    return departs if departs >= size else None
