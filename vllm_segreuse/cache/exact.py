# SPDX-License-Identifier: Apache-2.0
"""The exact tier: blocks of a request's own prefix that are still resident behind a hole.

    prompt     | 0 | 1 | 2 | 3 | 4 | 5      blocks, the last one partly full
    resident     *   *       *   *          under vLLM's own chained hash
    prefix hit   *   *                      ends at the first hole
    pieces                   *   *          copied as they are; block 2 and the tail are computed

A block's chained hash covers every token up to its end, and vLLM's own extra keys. One that equals
the request's hash holds the KV of exactly this prefix, whatever became of the blocks before it. The
same holds for records of the second tier that were made of such blocks.

What follows the prefix hit without a hole is *restored*: it is copied in front of whatever else a
plan does, for requests of every policy, as if vLLM had never evicted it.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import IntArray, Pieces

_FIRST_LOOK_BLOCKS = 8
"""As a rule the very first block behind a prefix hit is nowhere."""


class ResidentFinder(Finder):
    """Whole blocks of the prompt's own prefix, by vLLM's names for them.

    Nothing is prepared and nothing remembered: a search is as quick as vLLM's own prefix lookup.

    Args:
        block_size: tokens per block.
    """

    is_exact = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        first = -(-start // self._block_size)
        last = max(first, stop // self._block_size)
        return resident_matches(prompt.resident_blocks(first, last), first, self._block_size)

    def plan_stop(self, matches: Matches, start: int, stop: int) -> int:
        """What follows is vLLM's own work, as behind a prefix hit that ends here."""
        return matches.pieces.stop


def resident_matches(block_ids: IntArray, first_block: int, block_size: int) -> Matches:
    """Matches that copy whole blocks to where they have been computed for: no shift.

    Args:
        block_ids: int32 `[n]`, the resident block of each block of the prompt from `first_block`
            on; -1 for a hole.
        first_block: index of the first of them in the prompt.
        block_size: tokens per block.
    """
    resident = np.flatnonzero(block_ids >= 0)
    here = (first_block + resident) * block_size
    length, offset = np.full_like(here, block_size), np.zeros_like(here)
    pieces = Pieces.from_table(np.stack((here, length, block_ids[resident], offset, here), axis=1))
    runs = int(np.count_nonzero(np.diff(resident) > 1)) + int(resident.size > 0)
    return Matches(pieces, resident.size * block_size, runs, max_depth=0)


def restorable(prompt: Prompt, start: int, stop: int, block_size: int) -> Matches:
    """What follows a prefix hit without a hole, in whole blocks.

    Args:
        start: end of the prefix hit.
        stop: the last token of the prompt, which vLLM computes.
        block_size: tokens per block.
    """
    first, last = start // block_size, stop // block_size
    if start % block_size or first >= last:
        return NOTHING
    found: list[IntArray] = []
    at, look = first, _FIRST_LOOK_BLOCKS
    while at < last:
        blocks = prompt.resident_blocks(at, min(at + look, last))
        holes = np.flatnonzero(blocks < 0)
        found.append(blocks[: holes[0]] if holes.size else blocks)
        if holes.size:
            break
        at, look = at + look, 2 * look
    return resident_matches(np.concatenate(found), first, block_size)


def end_without_hole(pieces: Pieces, start: int, stop: int) -> int:
    """Where the first hole of `[start, stop)` is, in which pieces are whole blocks.

    Args:
        pieces: of a prompt; those from `stop` on do not matter.
    """
    within = pieces.destination < stop
    ends = start + np.cumsum(pieces.length[within])
    expected = np.concatenate(([start], ends[:-1]))
    behind_hole = np.flatnonzero(pieces.destination[within] != expected)
    if behind_hole.size:
        return int(expected[behind_hole[0]])
    return int(ends[-1]) if ends.size else start
