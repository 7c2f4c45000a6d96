# SPDX-License-Identifier: Apache-2.0
"""The workers' half of the second tier without a model: rows of host memory hold tags of slots."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.plan import Pieces, Tier, TierDone, TierOrders

if TYPE_CHECKING:
    from tests.stateful.worker import Identity, Worker

TAGS = ("token", "position", "history", "text", "depth", "copied")
"""Of each slot."""

FAILS_AT = 7
"""Of so many orders, the copies of one fail."""


class Rows:
    """Of one engine.

    Args:
        count: rows.
        worker: whose blocks are copied there, and back.
    """

    def __init__(self, count: int, worker: Worker) -> None:
        self._worker, self._size = worker, worker.block_size
        self.tags = {name: np.full(count * self._size, -1, np.int64) for name in TAGS}
        self.known_to: list[set[Identity]] = [set() for _ in range(count)]
        self.stored = self.restored = self.loaded = 0

    def carry_out(self, orders: TierOrders | None) -> TierDone:
        """A step begins: copy what it evicts; the report on it."""
        if orders is None:
            return TierDone()
        fails = orders.sequence % FAILS_AT == 0 and len(orders.rows) > 0
        for block, row in zip(orders.blocks.tolist(), orders.rows.tolist(), strict=True):
            for name, tags in self.tags.items():
                found = getattr(self._worker, name)[self._slots(block)]
                tags[self._slots(row)] = -1 if fails else found
            self.known_to[row] = set() if fails else set(self._worker.known_to[block])
        self.stored += len(orders.rows)
        return TierDone(Counter({orders.sequence: 1}), {orders.sequence} if fails else set())

    def source(self, tier: int, block: int) -> tuple[dict[str, np.ndarray], set[Identity]]:
        """What a block of the cache, or a row, holds, by tag; and who knows it."""
        if tier == Tier.HOST:
            self.loaded += 1
            return (
                {name: tags[self._slots(block)] for name, tags in self.tags.items()},
                self.known_to[block],
            )
        slots = self._slots(block)
        held = {name: getattr(self._worker, name)[slots].copy() for name in TAGS}
        return held, self._worker.known_to[block]

    def restore(self, pieces: Pieces, blocks: list[int]) -> None:
        """Copy whole blocks to where they belong.

        Args:
            blocks: of the request.
        """
        sources = zip(pieces.rows(), pieces.source.tolist(), strict=True)
        held = [(at, self.source(tier, block)[0]) for (at, _, block, _, _), tier in sources]
        for at, tags in held:
            slots = self._slots(blocks[at // self._size])
            for name, values in tags.items():
                getattr(self._worker, name)[slots] = values
            self.restored += self._size

    def _slots(self, block: int) -> slice:
        return slice(block * self._size, (block + 1) * self._size)
