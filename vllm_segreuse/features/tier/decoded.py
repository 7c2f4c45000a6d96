# SPDX-License-Identifier: Apache-2.0
"""Blocks whose KV was read from records of a codec that rounds, or copied from such a block. They
are not stored again.

A block is known by its id, until vLLM takes it for other content. What is computed anew has
provenance depth 0, and what other plans fill is noted as their plans leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_segreuse.features.tier.record import Seen
from vllm_segreuse.plan import ReusePlan, Tier


class Decoded:
    """One per engine whose codec rounds.

    Args:
        num_blocks: of vLLM's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._is_decoded = np.zeros(num_blocks, np.bool_)

    def note(self, plans: Iterable[ReusePlan], block_size: int) -> None:
        """These plans leave.

        Args:
            plans: with their blocks.
            block_size: tokens per block.
        """
        for plan in plans:
            written = plan.block_ids[plan.start // block_size : -(-plan.stop // block_size)]
            pieces = plan.pieces
            is_read = pieces.source == Tier.HOST
            is_read[~is_read] = self._is_decoded[pieces.block[~is_read]]
            self._is_decoded[written] = False
            read = np.flatnonzero(is_read)
            for first, length in zip(pieces.destination[read], pieces.length[read], strict=True):
                blocks = slice(int(first) // block_size, -(-int(first + length) // block_size))
                self._is_decoded[plan.block_ids[blocks]] = True

    def taken(
        self, block_ids: Sequence[int], seen: Sequence[Seen]
    ) -> tuple[list[Seen], list[Seen]]:
        """vLLM takes blocks for other content.

        Args:
            block_ids: of all that it takes.
            seen: those of them that might be stored.

        Returns:
            Those that may be, and those that were decoded.
        """
        decoded = [
            found for found in seen if self._is_decoded[found.block] and found.about.depth > 0
        ]
        self._is_decoded[list(block_ids)] = False
        lossy = {found.block for found in decoded}
        return [found for found in seen if found.block not in lossy], decoded

    def clear(self) -> None:
        """Blocks have lost their names."""
        self._is_decoded[:] = False
