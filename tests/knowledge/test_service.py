# SPDX-License-Identifier: Apache-2.0
"""The service of knowledge bases, on an engine without a model."""

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import numpy as np
import pytest

from bench.integrity import check_integrity
from tests.knowledge import fake_engine
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features.knowledge import service as service_module
from vllm_segreuse.features.knowledge import store
from vllm_segreuse.features.knowledge.catalogue import Catalogue
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.engine import NotFrozenError
from vllm_segreuse.features.knowledge.errors import (
    ConflictError,
    InvalidError,
    KnowledgeError,
    NoRoomError,
    NotFoundError,
    UnavailableError,
)
from vllm_segreuse.features.knowledge.schemas import AddDocuments, CreateBase, WarmDocuments
from vllm_segreuse.features.knowledge.service import KnowledgeService, start_service
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.features.knowledge.warming import Urgency, Warming, WarmingStatus
from vllm_segreuse.features.knowledge.work import Work
from vllm_segreuse.plan import FreezeOrder

SHAPE = Shape(block_size=BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)


serving = partial(fake_engine.serving, shape=SHAPE)


def run(test: Callable[[KnowledgeService, FakeEngine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        engine = FakeEngine(**options)
        async with serving(engine) as service:
            await service.create_base(CreateBase(name="base"))
            await test(service, engine)
            check_integrity(engine.pool)

    asyncio.run(main())


def documents(wait: bool = True, **content: list[int] | str) -> AddDocuments:
    return AddDocuments(
        documents=[
            {"id": i, "text" if isinstance(text, str) else "token_ids": text}  # type: ignore[misc]
            for i, text in content.items()
        ],
        wait=wait,
    )


async def statuses(service: KnowledgeService, base: str = "base") -> dict[str, str]:
    page = await service.documents(base, None, 100)
    return {document.id: document.status for document in page.data}


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await reached():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def test_a_long_document_is_cut_into_chunks_and_warm_as_a_whole() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        (document,) = await service.add("base", documents(doc=[*range(45)]))
        assert document.status == "warm"
        assert [part for _, part in engine.computed] == [0, 1, 2]
        # Three chunks of 15 tokens, each behind the first token of a sequence.
        assert document.blocks == engine.pool.num_frozen == 12

    run(test)


@pytest.mark.parametrize("num_context", [0, 1, 3, 4, 9, 45])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 19, 20, 21, 41, 62, 100])
def test_the_blocks_of_a_document_are_known_beforehand(num_context: int, num_tokens: int) -> None:
    context, tokens = np.arange(num_context, dtype=np.int32), np.arange(num_tokens, dtype=np.int32)
    prompts = SHAPE.prompts(context, tokens)
    blocks = sum(len(p) // BLOCK_SIZE - num_context // BLOCK_SIZE for p in prompts)
    assert SHAPE.num_blocks(num_context, num_tokens) == blocks
    assert all(len(p) % BLOCK_SIZE == 0 and len(p) <= SHAPE.max_prompt_tokens for p in prompts)
    kept = [p[num_context:] for p in prompts]
    sizes = [num_tokens // len(prompts) + (i < num_tokens % len(prompts)) for i in range(len(kept))]
    together = np.concatenate([k[:n] for k, n in zip(kept, sizes, strict=True)])
    assert np.array_equal(together, tokens)


@pytest.mark.parametrize("stages", [1, 2])
def test_between_pipeline_stages_no_document_is_compressed(stages: int) -> None:
    async def main() -> None:
        async with fake_engine.serving(
            FakeEngine(), shape=SHAPE._replace(stages=stages)
        ) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", documents(a=[*range(19)]))
            half = {"id": "b", "token_ids": [*range(20)], "keep": 0.5}
            asked = AddDocuments(documents=[half], wait=False)  # type: ignore[list-item]
            if stages == 1:
                await service.add("base", asked)
                return
            with pytest.raises(InvalidError, match="pipeline_parallel_size=2 does not compress"):
                await service.add("base", asked)

    asyncio.run(main())


def test_24_what_does_not_fit_is_refused_whole() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(19)]))
        before = await service.stats()
        with pytest.raises(NoRoomError, match="40"):
            await service.add("base", documents(b=[5], c=[*range(180)]))
        assert await service.stats() == before
        # What it replaces makes room.
        await service.add("base", documents(a=[*range(100, 120)] * 6))
        assert (await service.stats()).documents.warm == 1

    run(test)


@pytest.mark.parametrize(("limit", "fits"), [(5, True), (4, False)])
def test_24_what_just_fits_is_taken_and_a_block_more_is_not(limit: int, fits: bool) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        adding = service.add("base", documents(a=[*range(19)]))  # behind one token: five blocks
        if fits:
            assert [document.status for document in await adding] == ["warm"]
        else:
            with pytest.raises(NoRoomError, match=f"need 5 KV blocks.*have {limit}"):
                await adding

    run(test, limit=limit)


def test_25_replacing_lets_the_old_content_go() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(19)]))
        (old,) = engine.pool.warm()
        await service.add("base", documents(a=[*range(30, 49)]))
        assert old not in engine.pool.warm()
        assert engine.pool.num_frozen == 5
        computed = len(engine.computed)
        await service.add("base", documents(a=[*range(30, 49)]))
        assert len(engine.computed) == computed, "unchanged: nothing to do"

    run(test)


def test_25_two_changes_of_one_document_at_once_are_refused() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        first = asyncio.create_task(service.add("base", documents(wait=False, a=[1, 2, 3])))
        await asyncio.sleep(0)
        with pytest.raises(ConflictError, match="'a'"):
            await service.add("base", documents(a=[4, 5, 6]))
        await first
        await service.add("base", documents(a=[4, 5, 6]))

    run(test)


def test_25_a_base_stays_while_one_of_its_documents_is_being_changed() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[1, 2, 3], b=[7, 8, 9]))
        changing = asyncio.create_task(service.add("base", documents(wait=False, a=[4, 5, 6])))
        await asyncio.sleep(0)
        with pytest.raises(ConflictError, match="'a' is being changed by another request"):
            await service.delete_base("base")
        await changing
        page = await service.documents("base", None, 10)
        assert [document.id for document in page.data] == ["a", "b"]
        await service.delete_base("base")
        assert not (await service.bases(None, 10)).data

    run(test)


def test_25_two_creations_at_once_make_one_base() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        bodies = [CreateBase(name="new", preamble=text) for text in ("one", "two")]
        results = await asyncio.gather(
            *(service.create_base(body) for body in bodies), return_exceptions=True
        )
        assert sorted(isinstance(r, ConflictError) for r in results) == [False, True]

    run(test)


def test_25_deleted_while_it_is_computed_leaves_nothing_frozen() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.gate.clear()
        adding = asyncio.create_task(service.add("base", documents(a=[*range(45)])))
        await until(lambda: _is(engine.at_once))
        await service.delete_base("base")
        engine.gate.set()
        await adding
        await until(lambda: _is(not engine.pool.num_frozen))
        assert len(engine.computed) == 1, "the other chunks are not computed any more"
        await service.delete_base("base")
        with pytest.raises(NotFoundError):
            await service.delete_base("never")

    run(test)


def test_deleted_and_added_again_while_it_is_computed_it_is_warm() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.gate.clear()
        adding = asyncio.create_task(service.add("base", documents(a=[*range(45)])))
        await until(lambda: _is(engine.at_once))
        await service.delete("base", "a")
        again = asyncio.create_task(service.add("base", documents(a=[*range(45)])))
        await asyncio.sleep(0.05)
        engine.gate.set()
        await asyncio.gather(adding, again)
        assert await statuses(service) == {"a": "warm"}

    run(test)


def test_deleted_and_added_again_between_two_of_its_parts_it_is_warm() -> None:
    """With the first part frozen already: the deletion takes that away."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        compute, waits = engine.compute, True

        async def one_by_one(*arguments: Any) -> bool:
            done = await compute(*arguments)
            if waits:
                engine.gate.clear()
            return done

        engine.compute = one_by_one  # type: ignore[method-assign]
        adding = asyncio.create_task(service.add("base", documents(a=[*range(45)])))
        await until(lambda: _is(len(engine.computed) == 1 and engine.at_once))
        await service.delete("base", "a")
        again = asyncio.create_task(service.add("base", documents(a=[*range(45)])))
        await asyncio.sleep(0.05)
        waits = False
        engine.gate.set()
        await asyncio.gather(adding, again)
        assert await statuses(service) == {"a": "warm"}

    run(test)


@pytest.mark.parametrize("keep", [None, 1.0])
@pytest.mark.parametrize("times", [1, 2])
def test_26_evicted_between_two_of_its_parts_it_is_computed_once_more(
    times: int, keep: float | None
) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        finish, evicted = engine.freezing.finish, 0

        def finish_and_evict(prompt: Any, order: FreezeOrder, *more: Any) -> bool:
            nonlocal evicted
            frozen = finish(prompt, order, *more)
            if order.part == 0 and evicted < times:
                evicted += 1
                engine.pool.make_free(1)
            return frozen

        engine.freezing.finish = finish_and_evict  # type: ignore[method-assign]
        body = {"documents": [{"id": "doc", "token_ids": [*range(45)], "keep": keep}], "wait": True}
        (document,) = await service.add("base", AddDocuments.model_validate(body))
        if times == 1:
            assert document.status == "warm"
        else:
            assert document.status == "failed"
            assert "warm it again" in (document.error or "")
            assert engine.pool.num_frozen == 0
            (document,) = await service.warm("base", WarmDocuments(wait=True))
            assert document.status == "warm"
        if keep is not None:
            (named,) = await service.named(["base/doc"], ["base"])
            assert named.tokens.tolist() == [*range(45)], "what was chosen is known"

    run(test)


def test_26_cold_after_a_reset_until_warmed() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(9)], b=[*range(5)]))
        engine.pool.reset()
        await asyncio.sleep(0.05)
        assert await statuses(service) == {"a": "cold", "b": "cold"}
        await service.warm("base", WarmDocuments(ids=["b"], wait=True))
        assert await statuses(service) == {"a": "cold", "b": "warm"}
        with pytest.raises(NotFoundError):
            await service.warm("base", WarmDocuments(ids=["b", "c"]))

    run(test)


@pytest.mark.parametrize("answer", [False, RuntimeError("the engine said no")])
def test_what_cannot_be_computed_says_why_and_can_be_tried_again(answer: Any) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.answer = answer
        (document,) = await service.add("base", documents(a=[*range(9)]))
        assert document.status == "failed"
        assert document.error
        engine.answer = None
        (document,) = await service.warm("base", WarmDocuments(wait=True))
        assert (document.status, document.error) == ("warm", None)

    run(test)


def test_what_is_asked_for_while_it_is_computed_is_computed_once() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.gate.clear()
        adding = asyncio.create_task(service.add("base", documents(a=[*range(9)])))
        await until(lambda: _is(engine.at_once))
        warming = asyncio.create_task(service.warm("base", WarmDocuments(ids=["a"], wait=True)))
        again = asyncio.create_task(service.add("base", documents(a=[*range(9)])))
        await asyncio.sleep(0.05)
        engine.gate.set()
        await asyncio.gather(adding, warming, again)
        assert await statuses(service) == {"a": "warm"}
        assert len(engine.computed) == 1

    run(test)


def test_a_failure_says_which_document_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """Each cause has words of its own; the log names the document."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        for reason in ("the pool is full of stones", "2 of its 3 blocks may not donate"):
            engine.answer = NotFrozenError(reason)
            [document] = await service.add("base", documents(**{"faq.md": [*range(9)]}))
            assert (document.status, document.error) == ("failed", reason)
            assert "base/faq.md" in caplog.records[-1].getMessage()
            assert reason in caplog.records[-1].getMessage()
            await service.delete("base", "faq.md")
        engine.answer = None
        [document] = await service.add("base", documents(**{"faq.md": [*range(9)]}))
        assert (document.status, document.error) == ("warm", None)

    with caplog.at_level("WARNING", "vllm.segreuse"):
        run(test)


def test_an_entry_that_is_computed_at_the_second_try_has_no_error() -> None:
    """The second try was asked for while the first was under way."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        compute, gate, tries = engine.compute, asyncio.Event(), []

        async def fails_first(*args: Any) -> bool:
            tries.append(args)
            await gate.wait()
            return len(tries) > 1 and await compute(*args)

        engine.compute = fails_first  # type: ignore[method-assign]
        adding = asyncio.create_task(service.add("base", documents(a=[*range(9)])))
        await until(lambda: asyncio.sleep(0, bool(tries)))
        again = asyncio.create_task(service.add("base", documents(a=[*range(9)])))
        await until(lambda: asyncio.sleep(0, bool(service.warming.status().again)))
        gate.set()
        await asyncio.gather(adding, again)
        assert len(tries) == 2
        document = await service.document("base", "a")
        assert (document.status, document.error) == ("warm", None)
        assert not service.warming.status().failed

    run(test)


def test_one_chunk_at_a_time_beside_users() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.gate.clear()
        adding = service.add("base", documents(**{f"a{i}": [i, 2, 3] for i in range(9)}))
        added = asyncio.create_task(adding)
        await until(lambda: asyncio.sleep(0, engine.at_once > 1))
        engine.gate.set()
        await added
        assert 1 < engine.most_at_once <= 4
        engine.most_at_once, engine.others = 0, 1
        await service.add("base", documents(**{f"b{i}": [i, 3, 4] for i in range(9)}))
        assert engine.most_at_once == 1

    run(test)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"a": [1000]}, "documents.0.token_ids"),
        ({"b": [1], "a": [3, 1000]}, "documents.1.token_ids"),
    ],
)
def test_token_ids_of_another_model_are_refused(body: dict[str, Any], param: str) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        with pytest.raises(InvalidError) as caught:
            await service.add("base", documents(**body))
        assert caught.value.param == param
        assert await statuses(service) == {}

    run(test)


def test_every_token_of_the_model_may_be_in_a_document() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[0, engine.vocab_size - 1]))
        with pytest.raises(InvalidError, match="token 1000 is none of this model's 1000"):
            await service.add("base", documents(b=[0, engine.vocab_size]))

    run(test)


@pytest.mark.parametrize(("longest", "whole"), [(64, 60), (65, 64), (68, 64), (69, 68)])
def test_a_prompt_leaves_room_for_one_token_of_output(longest: int, whole: int) -> None:
    async def main() -> None:
        model = Of(max_model_len=longest, hf_config=Of(to_dict=dict))
        vllm_config = Of(
            model_config=model,
            cache_config=Of(block_size=BLOCK_SIZE),
            parallel_config=Of(pipeline_parallel_size=1),
        )
        service = await start_service(FakeEngine(), vllm_config, SegReuseConfig())
        await service.create_base(CreateBase(name="largest", preamble="x" * (whole - 2)))
        with pytest.raises(InvalidError) as caught:
            await service.create_base(CreateBase(name="more", preamble="x" * (whole - 1)))
        assert str(caught.value) == (
            f"a preamble of {whole} tokens leaves no room for documents in prompts of {whole} "
            "tokens: shorten it"
        )
        assert caught.value.param == "preamble"
        await service.close()

    asyncio.run(main())


@pytest.mark.parametrize("in_background", [True, False])
def test_what_an_earlier_run_has_left_is_warmed_in_the_background_or_not(
    tmp_path: Path, in_background: bool
) -> None:
    async def started(**options: Any) -> KnowledgeService:
        model = Of(max_model_len=64, hf_config=Of(to_dict=dict))
        vllm_config = Of(
            model_config=model,
            cache_config=Of(block_size=BLOCK_SIZE),
            parallel_config=Of(pipeline_parallel_size=1),
        )
        config = SegReuseConfig(knowledge_path=str(tmp_path / "m"), knowledge_chunk_tokens=5)
        return await start_service(FakeEngine(), vllm_config, config, **options)

    async def main() -> None:
        service = await started()
        await service.create_base(CreateBase(name="base"))
        await service.add("base", documents(a=[*range(11)]))
        [kept] = service.store.load().documents
        assert len(kept.tokens) == 11
        await service.close()
        service = await started(**({"in_background": True} if in_background else {}))
        await service.finish()
        assert await statuses(service) == {"a": "warm" if in_background else "cold"}
        [document] = await service.warm("base", WarmDocuments(wait=True))
        assert document.blocks == 5, "chunks of 4, 4 and 3 tokens, each behind one"
        await service.close()

    asyncio.run(main())


def test_a_preamble_without_room_for_documents_is_refused() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        with pytest.raises(InvalidError):
            await service.create_base(CreateBase(name="other", preamble="x" * 60))

    run(test)


def test_hits_are_counted_and_outlive_a_restart_most_used_first(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.sqlite")

    async def main() -> None:
        engine = FakeEngine()
        async with serving(engine, path=path) as service:
            await service.create_base(CreateBase(name="base"))
            content: Any = {name: [i, *range(8)] for i, name in enumerate("abc")}
            await service.add("base", documents(**content))
            entries = {d: service.catalogue.bases["base"].documents[d].entry for d in "abc"}
            for name in "bcc":
                engine.use(entries[name])
            assert (await service.document("base", "c")).hits == 2
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine, path=path) as service:
            assert await statuses(service) == dict.fromkeys("abc", "warming")
            engine.gate.set()
            await until(lambda: _all_warm(service))
            assert [entry for entry, _ in engine.computed] == [entries[d] for d in "cba"]
            assert (await service.stats()).hits == 3

    asyncio.run(main())


def test_with_less_memory_than_before_what_does_not_fit_stays_cold(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.sqlite")

    async def main() -> None:
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", documents(a=[*range(19)], b=[*range(30, 49)]))
        async with serving(FakeEngine(limit=6), path=path) as service:
            await until(lambda: _queue_is_empty(service))
            assert sorted((await statuses(service)).values()) == ["cold", "warm"]

    asyncio.run(main())


def test_another_models_manifest_is_refused_entry_by_entry(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.sqlite")

    async def main() -> None:
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base", metadata={"kept": [1.5, None]}))
            await service.add("base", documents(a=[*range(9)]))
        engine = FakeEngine()
        async with serving(engine, path=path, model="another") as service:
            (document,) = (await service.documents("base", None, 9)).data
            assert document.status == "failed"
            assert "another model" in str(document.error)
            assert engine.computed == []
            (document,) = await service.warm("base", WarmDocuments(wait=True))
            assert document.status == "failed"
            await service.add("base", documents(a=[*range(9)]))
            assert await statuses(service) == {"a": "warm"}
        engine = FakeEngine()
        engine.start = [2]  # another tokenizer
        async with serving(engine, path=path, model="another") as service:
            assert await statuses(service) == {"a": "failed"}

    asyncio.run(main())


class Refusing:
    """A method that fails while it is told to."""

    def __init__(self, target: Any, name: str, error: Exception) -> None:
        self.is_failing, self.calls, self._error = True, 0, error
        self._method = getattr(target, name)
        setattr(target, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.is_failing:
            raise self._error
        return self._method(*args)


FULL = sqlite3.OperationalError("database or disk is full")


def damage(service: KnowledgeService, document: str) -> None:
    """Its row in the manifest becomes one that was written for another base."""
    record = service.store.document("base", "base", document)
    assert record is not None
    service.store.put("of another base", [record])


def use(service: KnowledgeService, engine: FakeEngine, document: str) -> None:
    entry = service.catalogue.bases["base"].documents[document].entry
    engine.use(entry)


def test_counts_that_could_not_be_written_are_written_later(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.sqlite")

    async def main() -> None:
        engine = FakeEngine()
        async with serving(engine, path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", documents(a=[*range(9)], b=[*range(20)]))
            writing = Refusing(service.store, "save_uses", FULL)
            use(service, engine, "a")
            await until(lambda: _is(writing.calls > 1))
            use(service, engine, "b")
            await until(lambda: _is(writing.calls > 3))
            writing.is_failing = False
        async with serving(FakeEngine(), path=path) as service:
            page = await service.documents("base", None, 9)
            assert {d.id: d.hits for d in page.data} == {"a": 1, "b": 1}

    asyncio.run(main())


def test_what_was_used_since_the_last_look_is_counted_at_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.sqlite")

    async def main() -> None:
        engine = FakeEngine()
        service = KnowledgeService(engine, Store(path, "model"), SHAPE, poll_s=3600)
        await service.start()
        await service.create_base(CreateBase(name="base"))
        await service.add("base", documents(a=[*range(9)]))
        use(service, engine, "a")
        await service.close()
        async with serving(FakeEngine(), path=path) as service:
            assert (await service.document("base", "a")).hits == 1

    asyncio.run(main())


@pytest.mark.parametrize("failing", ["uses", "engine"])
def test_closing_lets_the_manifest_go_whatever_fails(tmp_path: Path, failing: str) -> None:
    path = str(tmp_path / "manifest.sqlite")

    async def main() -> None:
        engine = FakeEngine()
        before = threading.enumerate()
        async with serving(engine, path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", documents(a=[*range(9)]))
            use(service, engine, "a")
            own = [thread for thread in threading.enumerate() if thread not in before]
            assert len(own) == 2
            if failing == "uses":
                Refusing(service.store, "save_uses", FULL)
            else:
                Refusing(engine, "frozen", RuntimeError("dead"))
        Store(path, "model").close()
        assert not any(thread.is_alive() for thread in own), own

    asyncio.run(main())


def test_a_manifest_that_cannot_be_written_is_unavailable_and_nothing_has_changed() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(9)]))
        for method in ("put", "delete", "delete_base", "add_base"):
            Refusing(service.store, method, FULL)
        for change in (
            service.add("base", documents(b=[*range(9)])),
            service.delete("base", "a"),
            service.delete_base("base"),
            service.create_base(CreateBase(name="new")),
        ):
            with pytest.raises(UnavailableError, match="disk is full"):
                await change
        assert await statuses(service) == {"a": "warm"}
        assert (await service.stats()).bases == 1

    run(test)


def test_what_is_left_of_removed_documents_keeps_no_change_from_being_made() -> None:
    """Their counts cannot be forgotten: the next start does that."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(9)], b=[*range(9)], c=[*range(9, 18)]))
        forgetting = Refusing(service.store, "forget_uses", FULL)
        await service.delete("base", "c")
        [added] = await service.add("base", documents(a=[*range(20)]))
        assert added.status == "warm"
        await service.delete_base("base")
        assert forgetting.calls == 3
        assert not engine.pool.num_frozen

    run(test)


def test_what_could_not_be_unfrozen_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(9)], b=[*range(30)]))
        unfreezing = Refusing(engine, "unfreeze", RuntimeError("between two steps"))
        await service.delete("base", "a")
        await until(lambda: _is(unfreezing.calls > 2))
        assert len(engine.pool.warm()) == 2
        assert caplog.text.count("between two steps") == 1, "said once, not at every attempt"
        unfreezing.is_failing = False
        await until(lambda: _is(len(engine.pool.warm()) == 1))
        assert await statuses(service) == {"b": "warm"}
        calls = unfreezing.calls
        await asyncio.sleep(0.05)
        assert unfreezing.calls == calls, "and then no more"

    run(test)


def test_what_was_added_again_meanwhile_is_not_unfrozen() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(9)]))
        unfreezing = Refusing(engine, "unfreeze", RuntimeError("no"))
        await service.delete("base", "a")
        await service.add("base", documents(a=[*range(9)]))
        unfreezing.is_failing = False
        await asyncio.sleep(0.05)
        assert await statuses(service) == {"a": "warm"}

    run(test)


def test_deleted_while_it_is_computed_is_unfrozen_although_it_fails_at_first() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.gate.clear()
        adding = asyncio.create_task(service.add("base", documents(a=[*range(45)])))
        await until(lambda: _is(engine.at_once))
        unfreezing = Refusing(engine, "unfreeze", RuntimeError("no"))
        await service.delete("base", "a")
        engine.gate.set()
        await adding
        assert engine.pool.num_frozen
        unfreezing.is_failing = False
        await until(lambda: _is(not engine.pool.num_frozen))

    run(test)


def test_what_cannot_be_computed_is_not_tried_for_ever() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.answer = RuntimeError("no")
        attempts = Refusing(engine, "compute", RuntimeError("no"))
        await service.add("base", documents(a=[*range(9)]))
        entry = service.catalogue.bases["base"].documents["a"].entry
        frozen = engine.frozen

        async def wanting() -> Any:
            return await frozen() | {"wanted": [entry, "unknown"]}

        engine.frozen = wanting  # type: ignore[method-assign]
        await asyncio.sleep(0.1)  # ten looks
        assert attempts.calls == 1
        assert await statuses(service) == {"a": "failed"}
        attempts.is_failing, engine.answer = False, None
        await service.warm("base", WarmDocuments(wait=True))
        engine.pool.reset()
        await until(lambda: _all_warm(service))  # wanted, and without a fault: it returns

    run(test)


def test_nothing_is_remembered_of_what_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_DELETED", 10)

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.answer = RuntimeError("no")
        for number in range(30):
            await service.add("base", documents(**{f"d{number}": [number, 1, 2]}))
            await service.delete("base", f"d{number}")
        status = service.warming.status()
        assert status == WarmingStatus(frozenset(), status.jobs, frozenset(), {}, frozenset())
        known = [n for n in range(30) if service.store.was_deleted("base", f"d{n}")]
        assert known == [*range(20, 30)]
        await service.delete("base", "d20")
        with pytest.raises(NotFoundError):
            await service.delete("base", "d19")

    run(test)


def test_asking_again_and_again_makes_no_queue_longer() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.gate.clear()
        content: Any = {f"d{number}": [number, 1, 2] for number in range(9)}
        await service.add("base", documents(wait=False, **content))
        for _ in range(50):
            await service.warm("base", WarmDocuments())
        assert service.warming.status().jobs <= 9
        engine.gate.set()
        await until(lambda: _all_warm(service))

    run(test)


def test_what_is_asked_for_comes_before_the_background() -> None:
    async def main() -> None:
        engine, order = FakeEngine(), []
        engine.others = 1
        engine.gate.clear()

        async def prompts(entry: str) -> Any:
            order.append(entry)
            return Work("key", 0, [np.arange(4, dtype=np.int32)], [4])

        async def chosen(entry: str, kept: Any) -> None:
            raise AssertionError(f"{entry} is not compressed")

        warming = Warming(engine, prompts, lambda entry: True, chosen)
        for entry in "abcdefgh":
            warming.add(entry, Urgency.BACKGROUND)
        await asyncio.sleep(0.01)
        done = warming.add("h", Urgency.ASKED_FOR)
        warming.add("g", Urgency.BACKGROUND)
        engine.gate.set()
        await done
        assert order[:5] == ["a", "b", "c", "d", "h"], "four were under way"
        await until(lambda: _is(not warming.status().pending))
        assert sorted(order) == [*"abcdefgh"], "each once"
        await warming.close()

    asyncio.run(main())


def test_what_takes_no_blocks_still_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        def new(name: str) -> AddDocuments:
            same: Any = [{"id": name, "token_ids": [1, 2], "metadata": {"k": "x" * 10_000}}]
            return AddDocuments(documents=same, wait=True)

        await service.add("base", new("a"))
        held = service.catalogue.num_bytes
        assert held > 40_000
        monkeypatch.setattr(service_module, "MAX_HELD_BYTES", held)
        with pytest.raises(NoRoomError, match=f"of at most {held}"):
            await service.add("base", new("b"))
        with pytest.raises(NoRoomError, match="preambles"):
            await service.create_base(CreateBase(name="other"))
        await service.add("base", new("a"))  # in its own place
        await service.delete("base", "a")
        await service.add("base", new("b"))
        assert await statuses(service) == {"b": "warm"}

    run(test)


def test_what_takes_no_blocks_is_told_in_bytes() -> None:
    """Of a document 1024, and four for each letter of its id and of its metadata; of a base four
    for each letter of its preamble and each token, and 24 for each letter of its metadata."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        catalogue = service.catalogue
        empty = catalogue.num_bytes
        assert empty == 1024 + 4 * len(engine.start_tokens()) + 24 * len("{}")
        new: Any = [{"id": "abc", "token_ids": [1, 2], "metadata": {"k": 7}}]
        await service.add("base", AddDocuments(documents=new, wait=True))
        assert catalogue.num_bytes - empty == 1024 + 4 * (len("abc") + len('{"k": 7}'))
        before = catalogue.num_bytes
        await service.create_base(CreateBase(name="other", preamble="Read", metadata={"k": 7}))
        context = catalogue.bases["other"].context
        assert catalogue.num_bytes - before == 1024 + 4 * (4 + len(context)) + 24 * len('{"k": 7}')

    run(test)


def test_the_servers_memory_holds_256_mib_of_what_is_said_of_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        full = 2**28 - (1024 + 4 * (len("a") + len("{}")))
        monkeypatch.setattr(Catalogue, "num_bytes", property(lambda catalogue: full))
        await service.add("base", documents(a=[1]))
        monkeypatch.setattr(Catalogue, "num_bytes", property(lambda catalogue: full + 1))
        with pytest.raises(NoRoomError) as caught:
            await service.add("base", documents(b=[1]))
        assert str(caught.value) == (
            "names, preambles and metadata of all bases and documents would take 268435457 bytes "
            "of the server's memory, of at most 268435456: delete some, or send less metadata"
        )

    run(test)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_lists_end_where_nothing_is_left(count: int) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        ids = [f"d{number}" for number in range(count)]
        if ids:
            await service.add("base", documents(**{i: [1, 2] for i in ids}))
        found, after, pages = [], None, 0
        while True:
            page = await service.documents("base", after, 2)
            found += [document.id for document in page.data]
            after, pages = page.next, pages + 1
            if after is None:
                break
        assert (found, pages) == (ids, max(1, -(-count // 2)))

    run(test)


def test_the_manifests_row_can_go_while_it_waits() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=[*range(9)]))
        engine.pool.reset()
        damage(service, "a")
        (document,) = await service.warm("base", WarmDocuments(wait=True))
        assert document.status == "failed"
        assert "cannot be read from the manifest" in str(document.error)

    run(test)


def test_every_error_has_a_status() -> None:
    for error in KnowledgeError.__subclasses__():
        assert 400 <= error.status <= 599
        assert error.type != KnowledgeError.type


async def _is(value: Any) -> bool:
    return bool(value)


async def _all_warm(service: KnowledgeService) -> bool:
    return set((await statuses(service)).values()) == {"warm"}


async def _queue_is_empty(service: KnowledgeService) -> bool:
    return not service.warming.status().pending
