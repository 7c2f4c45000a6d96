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

from vllm_segreuse.cache.matcher import BLOCK, DESTINATION, LENGTH, POSITION, Matches
from vllm_segreuse.plan import IntArray


def resident_matches(block_ids: IntArray, first_block: int, block_size: int) -> Matches:
    """Matches that copy whole blocks to where they have been computed for: no shift, no drift.

    Args:
        block_ids: int32 `[n]`, the resident block of each block of the prompt from `first_block`
            on; -1 for a hole.
        first_block: index of the first of them in the prompt.
        block_size: tokens per block.
    """
    resident = np.flatnonzero(block_ids >= 0)
    pieces = np.zeros((resident.size, 5), np.int32)
    pieces[:, DESTINATION] = pieces[:, POSITION] = (first_block + resident) * block_size
    pieces[:, LENGTH] = block_size
    pieces[:, BLOCK] = block_ids[resident]
    runs = int(np.count_nonzero(np.diff(resident) > 1)) + int(resident.size > 0)
    return Matches(pieces, resident.size * block_size, runs, max_depth=0)
