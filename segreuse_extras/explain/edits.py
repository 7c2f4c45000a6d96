# SPDX-License-Identifier: Apache-2.0
"""Where a prompt departs from an earlier one that it goes on with, and what was found behind.

earlier    S t t a b c d        the prompt's prefix ends behind S: t is gone, x is new
prompt     S x   a b c d        a to d were computed in a sequence that begins with S
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.contexts import UNKNOWN
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import Pieces


class Edit(NamedTuple):
    """One.

    Attributes:
        at: first token that is another one than in the earlier sequence.
        gone_tokens: that stood there, in front of what was found again.
        new_tokens: that stand there now.
        found_tokens: behind, found and moved.
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
    at = start
    for i in range(len(pieces)):
        destination, position = int(pieces.destination[i]), int(pieces.position[i])
        if destination == position == at:
            at += int(pieces.length[i])
            continue
        if destination == position or position < at or at == 0:
            return None
        if not _begins_with_prompt(index, prompt, pieces, i, at):
            return None
        return Edit(at, position - at, destination - at, int(pieces.length[i:].sum()))
    return None


def _begins_with_prompt(
    index: SegmentIndex, prompt: Prompt, pieces: Pieces, piece: int, at: int
) -> bool:
    """Whether the sequence of a piece begins with the prompt's whole blocks up to `at`."""
    size = index.block_size
    block = pieces.block[piece : piece + 1]
    [entry] = index.entries(prompt.namespace, block).tolist()
    if entry < 0:  # what an earlier turn has moved is in no index
        return False
    between = (int(pieces.position[piece]) - int(pieces.offset[piece])) // size - at // size
    if between:
        block = index.ancestors(entry, between)
        if len(block) < between:  # some of them are evicted
            return False
    contexts = prompt.contexts(np.array([at // size], np.int32))
    return bool(contexts[0] != UNKNOWN and contexts[0] == index.contexts[block[0]])
