# SPDX-License-Identifier: Apache-2.0
"""An engine of knowledge bases without a model: the real frozen pool on counted blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.integrity import frozen_parts
from segreuse_extras.compressed.orders import CopyOrder, ScoreOrder
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.engine import Answer
from vllm_segreuse.features.knowledge.freezing import Freezing
from vllm_segreuse.features.knowledge.frozen import FrozenPart, FrozenPool
from vllm_segreuse.features.knowledge.isolated import IsolatedDocuments
from vllm_segreuse.features.knowledge.kept import KeepingTier
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.options.parsing import COPY, EXTRA_KEYS, FREEZE, SCORE
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.scheduling.health import Health

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
        asked: tokens, extra arguments and sampling parameters of requests that compress.
        is_dumb: whether scores choose nothing.
    """

    vocab_size = 1000

    def __init__(self, limit: int = 40, tier: KeepingTier | None = None) -> None:
        self.held: Counter[int] = Counter()
        self.computed: list[tuple[str, int]] = []
        self.at_once = self.most_at_once = 0
        self.others = 0
        self.answer: bool | Exception | None = None
        self.asked: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = []
        self.is_dumb = False
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

    def use(self, entry: str) -> None:
        """A request reuses all blocks of an entry."""
        self.pool.used(block for part in frozen_parts(self.pool)[entry] for block in part.block_ids)

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

    def decode(self, tokens: list[int]) -> str | None:
        return "".join(chr(max(0, token - 2)) for token in tokens)

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
        prompt: Any = namespace
        taken = [next(self._next_block) for _ in range(blocks)]
        return self.freezing.finish(prompt, order, taken)

    async def answers(
        self, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> list[Answer]:
        """A score chooses the largest token ids; the larger one is, the less it was expected."""
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        self.asked.append((tokens, dict(extra_args), sampling))
        if SCORE in extra_args:
            first, stop, keep = ScoreOrder.parse(extra_args[SCORE])
            assert tokens[stop:-1] == tokens[first:stop], "the chunk does not probe itself"
            largest = sorted(range(first, stop), key=lambda i: -tokens[i])[:keep]
            return [Answer({"chosen": None if self.is_dumb else sorted(largest)})]
        if COPY not in extra_args:
            asks = sampling["prompt_logprobs"] is not None
            return [Answer({}, [-float(token) for token in tokens] if asks else None)]
        source, kept = CopyOrder.parse(extra_args[COPY])
        copied = [source[i] for i in kept]
        assert tokens[: len(kept)] == copied
        assert len(tokens) % BLOCK_SIZE == 1, "a full block has no name before it is computed"
        assert len(tokens) > len(kept) + 1, "nothing would be left to be computed"
        order = FreezeOrder.parse(extra_args[FREEZE])
        namespace = self._table.intern(extra_args[EXTRA_KEYS][0].encode())
        blocks = [next(self._next_block) for _ in range(-(-len(kept) // BLOCK_SIZE))]
        if self.answer is not None:
            return [Answer({"frozen": self.answer})]
        prompt: Any = namespace
        tokens_kept = np.array(copied, np.int32)
        frozen = self.freezing.finish(
            prompt, order, blocks, lambda _, ids: FrozenPart(namespace, ids, None, tokens_kept)
        )
        return [Answer({"frozen": frozen})]

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
    isolated: IsolatedDocuments | None = None,
) -> AsyncIterator[KnowledgeService]:
    """A service on this engine, started and closed."""
    service = KnowledgeService(engine, Store(str(path), model), shape, poll_s, isolated)
    await service.start()
    try:
        yield service
    finally:
        await service.close()
