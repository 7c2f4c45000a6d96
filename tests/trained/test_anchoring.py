# SPDX-License-Identifier: Apache-2.0
"""Documents of a model that reads anchors: which prompts make one, and what stays of them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segreuse_extras.compressed.orders import AnchorOrder
from segreuse_extras.trained.anchors import AnchorNames, Anchors
from segreuse_extras.trained.documents import LaidOutDocuments
from segreuse_extras.trained.layout import Layout, Names
from tests.cache.keeping import FakeTier
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.engine import Answer
from vllm_segreuse.features.knowledge.errors import ConflictError, InvalidError, NoRoomError
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.features.knowledge.schemas import AddDocuments, CreateBase
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.options.parsing import ANCHORS, EXTRA_KEYS, FREEZE
from vllm_segreuse.plan import FreezeOrder

OF_CHUNK = Anchors(4, (905, 906))
LAYOUT = Layout(901, 902, ((903,), (904,)), OF_CHUNK)
NAMES = Names(1, 2, "<s>", "</s>", "<{document}_{index}>", AnchorNames(4, 2))
SHAPE = LaidOutDocuments(NAMES, LAYOUT, lambda text: []).shape(
    Shape(BLOCK_SIZE, max_prompt_tokens=16, chunk_tokens=8)
)


class Engine(FakeEngine):
    """Freezes what the orders say, and checks what they copy.

    Attributes:
        prompts: of all requests.
        refuses: so many of the next requests are not frozen.
        most_frozen: blocks, at any time.
    """

    def __init__(self, limit: int = 40, tier: FakeTier | None = None) -> None:
        super().__init__(limit, tier)
        self.most_frozen = 0
        self.prompts: list[list[int]] = []
        self.refuses = 0

    async def answers(
        self, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> list[Answer]:
        await asyncio.sleep(0)
        assert not sampling, "vLLM copies nothing for a request that skips the prefix cache"
        self.prompts.append(tokens)
        freeze = FreezeOrder.parse(extra_args[FREEZE])
        order = AnchorOrder.parse(extra_args[ANCHORS])
        namespace = self._table.intern(extra_args[EXTRA_KEYS][0].encode())
        parts = self.pool.compressed(order.entry, namespace, so_far=True) or []
        so_far = [token for part in parts for token in np.asarray(part.tokens).tolist()]
        assert len(so_far) == order.copied
        assert tokens[1 : 1 + order.copied] == so_far
        if self.refuses:
            self.refuses -= 1
            return [Answer({"frozen": False})]
        first, stop = freeze.first_token, freeze.first_token + order.kept
        what = np.array(tokens[first:stop], np.int32)
        places = range(first // BLOCK_SIZE, -(-stop // BLOCK_SIZE))
        part = FrozenPart(namespace, [next(self._next_block) for _ in places], None, what, first)
        answer = Answer({"frozen": self.pool.add(freeze, part)})
        self.most_frozen = max(self.most_frozen, self.pool.num_frozen)
        return [answer]


@asynccontextmanager
async def serving(engine: Engine, path: str | Path = IN_MEMORY) -> AsyncIterator[KnowledgeService]:
    isolated = LaidOutDocuments(NAMES, LAYOUT, engine.encode)
    service = KnowledgeService(engine, Store(str(path), "model"), SHAPE, 0.01, isolated)
    await service.start()
    try:
        await service.create_base(CreateBase(name="kb", extra_key="key"))
        yield service
    finally:
        await service.close()


def added(engine: Engine, ids: list[int]) -> Any:
    async def run() -> Any:
        async with serving(engine) as service:
            body = AddDocuments.model_validate(
                {"documents": [{"id": "a", "token_ids": ids}], "wait": True}
            )
            (document,) = await service.add("kb", body)
            (named,) = await service.named(["kb/a"], ["key"])
            return document, named, dict(engine.pool.warm())

    return asyncio.run(run())


def test_each_chunk_stands_behind_the_anchors_of_those_before_it() -> None:
    engine = Engine()
    document, named, warm = added(engine, [10, 11, 12, 13, 14, 15, 16, 17, 18])
    assert engine.prompts == [
        [901, 10, 11, 12, 13, 905, 906],
        [901, 905, 906, 14, 15, 16, 17, 905, 906],
        [901, 905, 906, 905, 906, 18, 905],
        [901, 905, 906, 905, 906, 905, 902],
    ]
    assert (document.status, document.tokens, document.blocks) == ("warm", 11, 2)
    assert named.tokens.tolist() == [905, 906, 905, 906, 905]
    assert [*warm] == [named.entry], "what was kept of the chunks is not"
    (part,) = engine.pool.compressed(named.entry, 0) or []
    assert np.asarray(part.tokens).tolist() == engine.prompts[-1]
    assert part.first == 0


def test_what_was_evicted_meanwhile_is_computed_once_more() -> None:
    engine = Engine()
    engine.refuses = 1
    document, _, _ = added(engine, [10, 11])
    assert document.status == "warm"
    assert len(engine.prompts) == 3


def test_what_cannot_be_frozen_is_told_to_who_names_it() -> None:
    engine = Engine()
    engine.refuses = 99
    with pytest.raises(ConflictError, match="'kb/a': the frozen pool had no room"):
        added(engine, [10, 11])
    assert engine.pool.num_frozen == 0


def test_a_cold_document_is_computed_for_who_names_it() -> None:
    engine = Engine()

    async def run() -> None:
        async with serving(engine) as service:
            body = AddDocuments.model_validate({"documents": [{"id": "a", "token_ids": [10]}]})
            await service.add("kb", body)
            await service.finish()
            engine.pool.make_free(1)
            assert not engine.pool.warm()
            (named,) = await service.named(["kb/a"], ["key"])
            assert [*engine.pool.warm()] == [named.entry]
            before = len(engine.prompts)
            await service.named(["kb/a"], ["key"])
            assert len(engine.prompts) == before, "it is warm"

    asyncio.run(run())


def test_a_document_that_is_named_while_it_is_computed_is_computed_once() -> None:
    engine = Engine()

    async def run() -> None:
        async with serving(engine) as service:
            body = AddDocuments.model_validate({"documents": [{"id": "a", "token_ids": [10]}]})
            adding = asyncio.create_task(service.add("kb", body))
            while not engine.prompts:
                await asyncio.sleep(0)
            await asyncio.gather(service.named(["kb/a"], ["key"]), adding)
            assert len(engine.prompts) == len({*map(tuple, engine.prompts)}), "each prompt once"

    asyncio.run(run())


def test_a_document_whose_prompts_would_be_too_long_is_refused() -> None:
    engine = Engine()
    # 20 tokens have ten anchors; with start, end and a chunk these take 16.
    assert added(engine, [10] * 20)[0].status == "warm"
    assert max(map(len, engine.prompts)) <= 16
    with pytest.raises(InvalidError, match=r"23 tokens and its anchors take 17 .* 16 at most"):
        added(Engine(), [10] * 21)


@pytest.mark.parametrize("size", [1, 4, 7, 9, 20])
def test_24_what_is_taken_can_be_computed(size: int) -> None:
    warm, meanwhile = SHAPE.num_blocks(0, size + 2), SHAPE.num_blocks_meanwhile(size + 2)
    engine = Engine(warm + meanwhile)
    assert added(engine, [10] * size)[0].status == "warm"
    assert engine.most_frozen == warm + meanwhile
    with pytest.raises(NoRoomError, match=f"need {warm} KV blocks, and {meanwhile} more while"):
        added(Engine(warm + meanwhile - 1), [10] * size)


def test_24_a_second_tier_makes_no_room_for_what_it_does_not_take() -> None:
    warm, meanwhile = SHAPE.num_blocks(0, 22), SHAPE.num_blocks_meanwhile(22)
    assert meanwhile > 0
    fits = Engine(warm + meanwhile, FakeTier(capacity_blocks=60))
    assert added(fits, [10] * 20)[0].status == "warm"
    with pytest.raises(NoRoomError, match=f"GPU memory only.*need {warm} KV.*{meanwhile} more"):
        added(Engine(warm + meanwhile - 1, FakeTier(capacity_blocks=60)), [10] * 20)


def test_24_the_largest_documents_can_be_computed_at_once() -> None:
    sizes = (20, 9, 20, 1, 20, 20, 5)
    warm = sum(SHAPE.num_blocks(0, size + 2) for size in sizes)
    limit = warm + 4 * SHAPE.num_blocks_meanwhile(22)

    async def run(engine: Engine) -> None:
        documents = [{"id": str(i), "token_ids": [10 + i] * n} for i, n in enumerate(sizes)]
        async with serving(engine) as service:
            body = AddDocuments.model_validate({"documents": documents, "wait": True})
            assert {d.status for d in await service.add("kb", body)} == {"warm"}

    asyncio.run(run(Engine(limit)))
    with pytest.raises(NoRoomError, match=f"need {warm} KV blocks"):
        asyncio.run(run(Engine(limit - 1)))


def test_24_with_less_memory_than_before_what_cannot_be_computed_stays_cold(tmp_path: Path) -> None:
    size = 20
    needed = SHAPE.num_blocks(0, size + 2) + SHAPE.num_blocks_meanwhile(size + 2)

    async def run(engine: Engine, add: bool) -> list[str]:
        async with serving(engine, tmp_path / "manifest") as service:
            if add:
                body = {"documents": [{"id": "a", "token_ids": [10] * size}], "wait": True}
                await service.add("kb", AddDocuments.model_validate(body))
            await service.finish()
            return [document.status for document in (await service.documents("kb", None, 9)).data]

    assert asyncio.run(run(Engine(needed), True)) == ["warm"]
    assert asyncio.run(run(Engine(needed), False)) == ["warm"]
    assert asyncio.run(run(Engine(needed - 1), False)) == ["cold"]
