# SPDX-License-Identifier: Apache-2.0
"""Blocks whose KV was read from records of a codec that rounds, or copied from such a block. They
are not stored again.

A block is known by its id, which gets other content later. What is computed anew has provenance
depth 0, and what other plans fill is noted as their plans leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_segreuse.plan import ReusePlan, Tier
from vllm_segreuse.tier.catalogue import Seen


class Decoded:
    """One per engine whose codec rounds."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def note(self, plans: Iterable[ReusePlan], block_size: int) -> None:
        """These plans leave.

        Args:
            plans: with their blocks.
            block_size: tokens per block.
        """
        for plan in plans:
            written = plan.block_ids[plan.start // block_size : -(-plan.stop // block_size)]
            pieces = plan.pieces
            copied = np.isin(pieces.block, [*self._blocks])
            self._blocks.difference_update(written.tolist())
            read = np.flatnonzero((pieces.source == Tier.HOST) | copied)
            for first, length in zip(pieces.destination[read], pieces.length[read], strict=True):
                blocks = slice(int(first) // block_size, -(-int(first + length) // block_size))
                self._blocks.update(plan.block_ids[blocks].tolist())

    def split(self, seen: Sequence[Seen]) -> tuple[list[Seen], list[Seen]]:
        """Of blocks that are evicted: those that may be stored, and those that were decoded."""
        mine = [found for found in seen if found.block in self._blocks and found.depth > 0]
        self._blocks.difference_update(found.block for found in seen)
        lossy = {found.block for found in mine}
        return [found for found in seen if found.block not in lossy], mine
