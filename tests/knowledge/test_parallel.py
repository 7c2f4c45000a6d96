# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of two engines behind one API server, each with a frozen pool of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace as Of
from typing import Any

import pytest

from bench.integrity import check_integrity
from tests.cache.keeping import FakeTier
from tests.knowledge import fake_engine
from tests.knowledge.fake_engine import BLOCK_SIZE, NUM_BLOCKS, FakeEngine
from tests.knowledge.test_service import documents, until
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.errors import NoRoomError, UnavailableError
from vllm_segreuse.features.knowledge.parallel import ParallelEngines, merged
from vllm_segreuse.features.knowledge.schemas import CreateBase, WarmDocuments
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.options.parsing import EXTRA_KEYS, FREEZE
from vllm_segreuse.plan import FreezeOrder

SHAPE = Shape(block_size=BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)
TEXT = [*range(10, 25)]
STATE = {"total": 9, "free": 8, "frozen": 1, "limit": 7, "block_size": 4, "given_back": 2}
STATE |= {"frozen_limit": 5}


class Client:
    """vLLM's engine client with engines that have no model."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = engines
        self.renderer = Of(tokenizer=object())
        self.model_config = Of(get_vocab_size=lambda: 1000)
        self.vllm_config = Of(scheduler_config=Of(policy="fcfs"))
        self.engine_core = self
        self.stopped = False

    def get_tokenizer(self) -> Any:
        return Of(encode=lambda text, add_special_tokens=True: [2 + ord(c) % 900 for c in text])

    def get_num_unfinished_requests(self) -> int:
        return sum(engine.at_once + engine.others for engine in self.engines)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, priority: int, data_parallel_rank: int
    ) -> Any:
        order = FreezeOrder.parse(params.extra_args[FREEZE])
        [key] = params.extra_args[EXTRA_KEYS]
        engine = self.engines[data_parallel_rank]
        frozen = await engine.compute(prompt["prompt_token_ids"], key, order)
        yield Of(kv_transfer_params={"segreuse": {"frozen": frozen}})

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        if self.stopped:
            from vllm.v1.engine.exceptions import EngineDeadError

            raise EngineDeadError
        assert method == "segreuse_call"
        name, *given = args
        return [await getattr(engine, name)(*given) for engine in self.engines]


Test = Callable[[KnowledgeService, Client], Awaitable[None]]


def run(test: Test, *limits: int) -> None:
    async def main() -> None:
        client = Client(*(FakeEngine(limit) for limit in limits or (40, 40)))
        engines: Any = ParallelEngines(client, len(client.engines))
        async with fake_engine.serving(engines, SHAPE) as service:
            await service.create_base(CreateBase(name="base"))
            await test(service, client)
            for engine in client.engines:
                check_integrity(engine.pool)

    asyncio.run(main())


def test_every_engine_computes_a_document() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        [document] = await service.add("base", documents(doc=TEXT))
        assert (document.status, document.engines) == ("warm", [0, 1])
        first, second = (engine.computed for engine in client.engines)
        assert len(first) == 1
        assert first == second
        stats = await service.stats()
        assert [engine.frozen for engine in stats.engines] == [document.blocks] * 2
        assert stats.documents.warm == 1

    run(test)


def test_a_document_that_one_engine_has_lost_is_warm_on_the_other() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        [document] = await service.add("base", documents(doc=TEXT))
        client.engines[0].pool.make_free(NUM_BLOCKS)
        found = await service.document("base", "doc")
        assert (found.status, found.engines) == ("cold", [1])
        assert (await service.base("base")).documents.cold == 1
        [again] = await service.warm("base", WarmDocuments(ids=["doc"], wait=True))
        assert (again.status, again.engines) == ("warm", [0, 1])
        frozen = [engine.pool.num_frozen for engine in client.engines]
        assert frozen == [document.blocks] * 2, "nothing is frozen twice"

    run(test)


def test_a_deleted_document_leaves_every_engine() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        await service.add("base", documents(doc=TEXT))
        await service.delete("base", "doc")
        assert [engine.pool.num_frozen for engine in client.engines] == [0, 0]

    run(test)


def test_what_one_engine_still_holds_of_a_deleted_document_is_removed_at_the_start() -> None:
    """It did not run when the document was deleted."""

    async def main() -> None:
        tiers = FakeTier(), FakeTier()
        tiers[1].keep("deleted", 0, 1, [1, 2])
        client = Client(*(FakeEngine(40, tier) for tier in tiers))
        async with fake_engine.serving(ParallelEngines(client, 2), SHAPE):  # type: ignore[arg-type]
            assert tiers[1].held() == {}

    asyncio.run(main())


def test_uses_on_all_engines_are_counted() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        await service.add("base", documents(doc=TEXT))
        for engine, times in zip(client.engines, (1, 2), strict=True):
            for _ in range(times):
                engine.pool.used(list(engine.held))
        assert (await service.document("base", "doc")).hits == 3

    run(test)


def test_room_is_that_of_the_smallest_engine() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        with pytest.raises(NoRoomError, match="knowledge bases may have 3"):
            await service.add("base", documents(doc=TEXT))
        stats = await service.stats()
        assert (stats.blocks.limit, [it.limit for it in stats.engines]) == (3, [40, 3])

    run(test, 40, 3)


def test_an_engine_without_room_is_an_error_of_the_document() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        client.engines[1].answer = False
        [document] = await service.add("base", documents(doc=TEXT))
        assert (document.status, document.engines) == ("failed", [0])
        assert "no room" in (document.error or "")

    run(test)


def test_what_an_engine_wants_back_returns() -> None:
    async def test(service: KnowledgeService, client: Client) -> None:
        [document] = await service.add("base", documents(doc=TEXT))
        client.engines[1].pool.make_free(NUM_BLOCKS)
        wanted = client.engines[0].computed[0][0]
        client.engines[1].pool.wanted = lambda: [wanted]  # type: ignore[method-assign]

        async def returned() -> bool:
            return (await service.document("base", "doc")).engines == [0, 1]

        await until(returned)
        assert document.blocks == client.engines[1].pool.num_frozen

    run(test)


def test_one_engines_error_is_told_once_all_have_ended() -> None:
    """What freezes blocks is given back next, and would be frozen on the others thereafter."""
    ended: list[int | None] = []

    class Failing(ParallelEngines):
        async def answer_on(self, rank: int | None, *_: Any, **__: Any) -> Any:
            if rank == 0:
                raise UnavailableError("the first one fails")
            for _ in range(9):
                await asyncio.sleep(0)
            ended.append(rank)

    engines: Any = Failing(Client(FakeEngine(), FakeEngine()), 2)
    with pytest.raises(UnavailableError, match="the first one fails"):
        asyncio.run(engines.answers([1, 2], {}))
    assert ended == [1]


def test_only_requests_of_others_count_as_such() -> None:
    client = Client(FakeEngine(), FakeEngine())
    engines = ParallelEngines(client, 2)
    client.engines[0].others, client.engines[1].others = 1, 2
    for engine in client.engines:
        engine.at_once = 2
    assert engines.num_others(own=2) == 3


def test_an_engine_that_has_stopped_is_told() -> None:
    client = Client(FakeEngine(), FakeEngine())
    client.stopped = True
    engines = ParallelEngines(client, 2)
    for call in (partial(engines.unfreeze, ["a"]), engines.frozen):
        with pytest.raises(UnavailableError, match="the engine has stopped"):
            asyncio.run(call())


def test_states_are_merged() -> None:
    one = STATE | {
        "warm": {"both": (3, 1), "one": (2, 0)},
        "uses": {"both": (2, 9.0), "one": (1, 3.0)},
        "wanted": ["x"],
        "stored": {"both": "host", "two": "host", "stored": "host", "half": "disk"},
    }
    two = (
        STATE
        | {"total": 5, "free": 9, "frozen": 4, "limit": 6, "given_back": 1, "frozen_limit": 4}
        | {
            "warm": {"both": (3, 4), "two": (2, 0)},
            "uses": {"both": (1, 7.0)},
            "wanted": ["y", "x"],
            "stored": {"one": "disk", "stored": "disk"},
        }
    )
    assert merged([one, two]) == {
        "engines": [one, two],
        "total": 5,
        "free": 8,
        "frozen": 4,
        "limit": 6,
        "frozen_limit": 4,
        "block_size": 4,
        "given_back": 3,
        "warm": {"both": [3, 5]},
        "uses": {"both": [3, 9.0], "one": [1, 3.0]},
        "wanted": ["x", "y"],
        # Each engine has these, in one tier or another; not all of them have it in GPU memory.
        "stored": {"one": "disk", "stored": "disk", "two": "host"},
    }
