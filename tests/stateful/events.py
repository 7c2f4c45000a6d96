# SPDX-License-Identifier: Apache-2.0
"""Somebody who is told of vLLM's KV events, and should know what its prefix cache has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

_OWN_NAME = b"segreuse:"


class Mirror:
    """Of one block pool.

    Args:
        pool: whose events are turned on, and are heard here as they are taken.
    """

    def __init__(self, pool: Any) -> None:
        pool.enable_kv_cache_events = True
        self._pool = pool
        self._take = pool.take_events
        self._blocks: Counter[Any] = Counter()
        pool.take_events = self.take

    def take(self) -> list[Any]:
        """What vLLM publishes."""
        events: list[Any] = self._take()
        for event in events:
            if isinstance(event, BlockStored):
                self._blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._blocks.subtract(event.block_hashes)
                assert min(self._blocks.values()) >= 0, "removed, and was never stored"
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
        return events

    def check(self) -> None:
        """What was told is what is there, but for names that nobody could look up."""
        self._pool.take_events()
        names = [get_block_hash(b.block_hash) for b in self._pool.blocks if b.block_hash]
        there = Counter(
            maybe_convert_block_hash(name) for name in names if not name.startswith(_OWN_NAME)
        )
        told = +self._blocks
        gone, untold = (told - there).total(), (there - told).total()
        assert told == there, f"told of {gone} blocks that are gone, not of {untold} that are there"
