# SPDX-License-Identifier: Apache-2.0
"""The exact tier: blocks of a request's own prefix that are still resident behind a hole.

    prompt     | 0 | 1 | 2 | 3 | 4 | 5      blocks, the last one partly full
    resident     *   *       *   *          under vLLM's own chained hash
    prefix hit   *   *                      ends at the first hole
    pieces                   *   *          copied as they are; block 2 and the tail are computed

A block's chained hash covers every token up to its end, and vLLM's own extra keys. One that equals
the request's hash holds the KV of exactly this prefix, whatever became of the blocks before it.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import IntArray, Pieces


class ResidentFinder:
    """Whole blocks of the prompt's own prefix, by vLLM's names for them.

    Nothing is prepared and nothing remembered: a search is as quick as vLLM's own prefix lookup.

    Args:
        block_size: tokens per block.
    """

    is_exact = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prepare(self, prompt: Prompt) -> None:
        pass

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        return None

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
