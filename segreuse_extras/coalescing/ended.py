# SPDX-License-Identifier: Apache-2.0
"""Whole blocks of prompts whose requests have ended while equal ones waited for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.scheduling.tracked import NOTHING_LEFT, LeftBehind


class LeftByEnded(BlockListener):
    """Of one engine. What vLLM gives to others is forgotten.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._left: dict[Hashable, tuple[Sequence[int], int]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def keep(self, key: Hashable, block_ids: Sequence[int], donor_depth: int) -> None:
        """A request has ended.

        Args:
            key: what equal prompts have in common.
            block_ids: the whole ones of its prompt, with names.
            donor_depth: of what it has read.
        """
        self._left[key] = block_ids, donor_depth

    def drop(self, key: Hashable) -> None:
        """Nobody waits for these any more."""
        self._left.pop(key, None)

    def evicted(self, block_ids: Sequence[int]) -> None:
        """Blocks lost their names."""
        gone = frozenset(block_ids if self._left else ())
        for key in [key for key, (blocks, _) in self._left.items() if not gone.isdisjoint(blocks)]:
            del self._left[key]

    def reset(self) -> None:
        """All names were removed."""
        self._left.clear()

    def found(self, key: Hashable, start: int, stop: int) -> LeftBehind:
        """Blocks of a prompt from token `start` on, which end at `stop` at the latest."""
        size, last = self._block_size, stop // self._block_size
        blocks, depth = self._left.get(key, ((), -1))
        if start >= last * size or not blocks:
            return NOTHING_LEFT
        return LeftBehind(start, last * size, [*blocks[start // size : last]], depth)
