# SPDX-License-Identifier: Apache-2.0
"""An engine of knowledge bases without a model: the real frozen pool on counted blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_segreuse.cache.freezing import Freezing
from vllm_segreuse.cache.frozen import FrozenPart, FrozenPool
from vllm_segreuse.cache.health import Health
from vllm_segreuse.cache.kept import KeepingTier
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.knowledge.chunks import Shape
from vllm_segreuse.knowledge.database import IN_MEMORY
from vllm_segreuse.knowledge.service import KnowledgeService
from vllm_segreuse.knowledge.store import Store
from vllm_segreuse.plan import FreezeOrder

BLOCK_SIZE = 4
NUM_BLOCKS = 100


class _Freezing(Freezing):
    """Of blocks that nobody has indexed."""

    def part(self, prompt: Any, order: FreezeOrder, block_ids: list[int]) -> FrozenPart:
        return FrozenPart(prompt, block_ids, None)


class FakeEngine:
    """Computes at once, or when told to.

    Attributes:
        computed: (entry, part) in order.
        gate: nothing is computed while it is not set.
        others: requests of users.
        answer: what `compute` says: None: what the frozen pool says; an error is raised.
    """

    vocab_size = 1000

    def __init__(self, limit: int = 40, tier: KeepingTier | None = None) -> None:
        self.held: Counter[int] = Counter()
        self.computed: list[tuple[str, int]] = []
        self.at_once = self.most_at_once = 0
        self.others = 0
        self.answer: bool | Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.start = [1]
        self._table = NamespaceTable(lambda namespace: False)
        self._ticks = count()
        self.pool = FrozenPool(
            self, self._table, NUM_BLOCKS, limit, 0.9, True, lambda: float(next(self._ticks))
        )
        index: Any = SimpleNamespace(block_size=BLOCK_SIZE)
        self.freezing = _Freezing(self.pool, index, lambda block: True, Health(), tier)
        self._next_block = count()

    # Block references.

    def pin(self, block_ids: list[int]) -> None:
        self.held.update(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        self.held.subtract(block_ids)

    def references(self, block_id: int) -> int:
        return self.held[block_id]

    def num_free_blocks(self) -> int:
        return NUM_BLOCKS - sum(n > 0 for n in self.held.values())

    # Engine.

    def start_tokens(self) -> list[int]:
        return list(self.start)

    def encode(self, text: str) -> list[int]:
        return [2 + ord(char) % 900 for char in text]

    def fingerprint(self) -> str:
        return "fake"

    def num_others(self, own: int) -> int:
        return self.others

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        await self.gate.wait()
        self.at_once -= 1
        assert len(tokens) % BLOCK_SIZE == 0, "only full blocks can be found again"
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        self.computed.append((order.entry, order.part))
        blocks = len(tokens) // BLOCK_SIZE - order.first_token // BLOCK_SIZE
        namespace = self._table.intern(extra_key.encode())
        tracked: Any = SimpleNamespace(freeze=order, prompt=namespace)
        return self.freezing.finish(tracked, [next(self._next_block) for _ in range(blocks)])

    async def frozen(self) -> dict[str, Any]:
        return self.freezing.state()

    async def unfreeze(self, entries: list[str]) -> None:
        self.freezing.forget(entries)


@asynccontextmanager
async def serving(
    engine: FakeEngine,
    shape: Shape,
    path: str | Path = IN_MEMORY,
    model: str = "model",
    poll_s: float = 0.01,
) -> AsyncIterator[KnowledgeService]:
    """A service on this engine, started and closed."""
    service = KnowledgeService(engine, Store(str(path), model), shape, poll_s=poll_s)
    await service.start()
    try:
        yield service
    finally:
        await service.close()
