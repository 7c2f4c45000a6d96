# SPDX-License-Identifier: Apache-2.0
"""Documents of which a share is kept: which tokens, in how many blocks, over a restart."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

from bench.integrity import check_integrity
from segreuse_extras.compressed.orders import CopyOrder
from tests.knowledge import fake_engine
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse import features
from vllm_segreuse.features.knowledge.chunks import Shape, lengths_of, num_blocks, shape_for
from vllm_segreuse.features.knowledge.compression import CompressionSettings
from vllm_segreuse.features.knowledge.errors import (
    ConflictError,
    InvalidError,
    KnowledgeError,
    NoRoomError,
    NotFoundError,
)
from vllm_segreuse.features.knowledge.schemas import AddDocuments, CreateBase, WarmDocuments
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import DocumentRecord, Store
from vllm_segreuse.features.knowledge.warming import Urgency, Warming
from vllm_segreuse.features.knowledge.work import Work, joined, work_for
from vllm_segreuse.options.parsing import COPY, SCORE

SHAPE = Shape(block_size=BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)
HALF = CompressionSettings(0.5, "attention")
TOKENS = [10, 40, 20, 30, 60, 50, 15]

serving = partial(fake_engine.serving, shape=SHAPE)


def run(
    test: Callable[[KnowledgeService, FakeEngine], Awaitable[None]],
    isolated: Any = None,
    **options: Any,
) -> None:
    async def main() -> None:
        engine = FakeEngine(**options)
        async with serving(engine, isolated=isolated) as service:
            await service.create_base(CreateBase(name="base", context="none"))
            await test(service, engine)
            check_integrity(engine.pool)

    asyncio.run(main())


def body(wait: bool = True, keep: float | None = 0.5, scorer: Any = None, **content: Any) -> Any:
    more = {} if keep is None else {"keep": keep, "scorer": scorer}
    each = [{"id": i, "token_ids": ids, **more} for i, ids in content.items()]
    return AddDocuments(documents=each, wait=wait)  # type: ignore[arg-type]


async def kept(service: KnowledgeService, name: str) -> list[int]:
    [found] = await service.named([f"base/{name}"], ["base"])
    return found.tokens.tolist()


# How many.


@pytest.mark.parametrize(
    ("keep", "tokens", "count"),
    [(0.5, 7, 4), (0.1, 30, 3), (1.0, 7, 7), (0.001, 7, 1), (0.25, 100, 25), (0.7, 10, 7)],
)
def test_a_share_is_rounded_up(keep: float, tokens: int, count: int) -> None:
    assert CompressionSettings(keep, "uniform").count(tokens) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[0.5]",
        '["a", "uniform"]',
        '[0, "uniform"]',
        '[0.5, "x"]',
        "[" * 10_000,
        "[1.5, 2]",
    ],
)
def test_what_is_no_compression_is_none(text: str) -> None:
    assert CompressionSettings.decode(text) is None


def test_a_compression_is_read_as_it_was_written() -> None:
    assert CompressionSettings.decode(HALF.encode()) == HALF


@given(st.integers(0, 20), st.integers(1, 90), st.floats(0.01, 1.0))
def test_promised_blocks_are_those_that_are_taken(context: int, tokens: int, keep: float) -> None:
    how = CompressionSettings(keep, "uniform")
    work = work_for(
        *(SHAPE, "key", np.arange(context, dtype=np.int32), np.arange(tokens, dtype=np.int32)),
        *(how, None),
    )
    taken = sum(-(-how.count(length) // BLOCK_SIZE) for length in work.lengths)
    assert num_blocks(SHAPE, how, context, tokens) == taken
    assert sum(work.lengths) == tokens
    for prompt, length in zip(work.prompts, work.lengths, strict=True):
        assert context + 2 * length + 1 <= SHAPE.max_prompt_tokens, "it does not fit twice"
        assert len(prompt) % BLOCK_SIZE == 0


def test_chunks_are_cut_as_prompts_are() -> None:
    cut = shape_for(SHAPE, HALF, 3)
    prompts = cut.prompts(np.zeros(3, np.int32), np.arange(1, 90, dtype=np.int32))
    found = [len(np.unique(prompt)) - 1 for prompt in prompts]
    assert found == lengths_of(cut, 3, 89)


def test_choices_of_other_chunks_are_not_used() -> None:
    tokens = np.arange(40, dtype=np.int32)
    arguments = (SHAPE, "key", np.zeros(3, np.int32), tokens, HALF)
    fits = work_for(*arguments, np.arange(0, 40, 2, dtype=np.int32))
    assert fits.kept is not None
    assert [part.tolist() for part in fits.kept] == [[*range(0, 20, 2)]] * 2
    assert joined(fits, fits.kept).tolist() == [*range(0, 40, 2)]
    assert work_for(*arguments, np.arange(20, dtype=np.int32)).kept is None


# Which.


@pytest.mark.parametrize(
    ("scorer", "wanted"),
    [
        ("attention", [40, 30, 60, 50]),
        (None, [40, 30, 60, 50]),
        ("surprise", [40, 30, 60, 50]),
        ("uniform", [10, 20, 60, 15]),
    ],
)
def test_scorers_choose(scorer: Any, wanted: list[int]) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        [added] = await service.add("base", body(scorer=scorer, a=TOKENS))
        assert (added.status, added.blocks, added.keep) == ("warm", 1, 0.5)
        assert added.scorer == (scorer or "attention")
        assert await kept(service, "a") == wanted
        assert any(SCORE in asked for _, asked, _ in engine.asked) == (
            scorer in (None, "attention")
        )
        for _, asked, sampling in engine.asked:
            if SCORE in asked or COPY in asked:
                assert not sampling, "vLLM supplies nothing to who skips its prefix cache"

    run(test)


def test_all_of_a_document_needs_no_scores() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(keep=1, a=TOKENS))
        assert await kept(service, "a") == TOKENS
        assert not any(SCORE in asked for _, asked, _ in engine.asked)

    run(test)


def test_each_chunk_keeps_its_share() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        tokens = [*range(100, 150)]
        [added] = await service.add("base", body(keep=0.25, a=tokens))
        assert added.blocks == 5, "three chunks, of which 5, 5 and 4 tokens are kept"
        last = [*range(112, 117), *range(129, 134), *range(146, 150)]
        assert await kept(service, "a") == last

    run(test)


def test_what_is_computed_is_the_text_in_its_context() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(a=TOKENS))
        (computed, none, _), *_ = engine.asked
        assert computed == [1, *TOKENS]
        assert none == {}, "what is dropped is found by nobody"
        source, _ = CopyOrder.parse(engine.asked[-1][1][COPY])
        assert source == [1, *TOKENS]

    run(test)


def test_without_scores_it_has_failed_and_says_so() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.is_dumb = True
        [added] = await service.add("base", body(a=TOKENS))
        assert added.status == "failed"
        assert "gave its tokens no scores" in (added.error or "")
        with pytest.raises(ConflictError, match="no scores"):
            await kept(service, "a")

    run(test)


def test_a_copy_that_failed_is_tried_again() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.answer = False
        [added] = await service.add("base", body(a=TOKENS))
        assert added.status == "failed"
        assert sum(COPY in asked for _, asked, _ in engine.asked) == 2
        assert sum(SCORE in asked for _, asked, _ in engine.asked) == 1

    run(test)


def test_a_model_that_reads_whole_documents_only_says_so() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        with pytest.raises(InvalidError, match="computed alone") as refused:
            await service.add("base", body(a=TOKENS))
        assert refused.value.param == "documents.0.keep"
        await service.add("base", body(keep=None, a=TOKENS))

    run(test, isolated=Mock(tokens=lambda text, token_ids, where: token_ids))


# Where no feature compresses.


@pytest.fixture
def nothing_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of features without the one that does."""
    others = (name for name in features.FEATURES if name != "segreuse_extras.compressed")
    monkeypatch.setattr(features, "FEATURES", tuple(others))


@pytest.mark.usefixtures("nothing_compresses")
def test_without_the_feature_documents_are_kept_whole_or_refused() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        with pytest.raises(InvalidError, match=r"list segreuse_extras\.compressed in") as refused:
            await service.add("base", body(a=TOKENS))
        assert refused.value.param == "documents.0.keep"
        [added] = await service.add("base", body(keep=None, a=TOKENS))
        assert added.status == "warm"

    run(test)


@pytest.mark.usefixtures("nothing_compresses")
def test_without_the_feature_an_order_to_compress_fails_and_says_why() -> None:
    async def main() -> None:
        whole, part = (
            work_for(SHAPE, "key", np.zeros(0, np.int32), np.arange(7, dtype=np.int32), how, None)
            for how in (None, HALF)
        )

        async def work_of(entry: str) -> Work:
            return {"whole": whole, "part": part}[entry]

        chosen = AsyncMock()
        warming = Warming(FakeEngine(), work_of, lambda entry: True, chosen)
        for entry in ("part", "whole"):
            await warming.add(entry, Urgency.ASKED_FOR)
        assert "list segreuse_extras.compressed in" in (warming.error("part") or "")
        assert warming.error("whole") is None
        chosen.assert_not_called()

    asyncio.run(main())


@pytest.mark.parametrize("stages", [1, 2])
def test_what_was_compressed_before_is_a_fault_where_nothing_compresses(
    tmp_path: Path, stages: int, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "manifest"

    async def before() -> None:
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", body(a=TOKENS))
            await service.add("base", body(keep=None, whole=TOKENS))

    async def after() -> None:
        engine, shape = FakeEngine(), SHAPE._replace(stages=stages)
        async with fake_engine.serving(engine, shape, path) as service:
            await service.finish()
            assert (await service.document("base", "whole")).status == "warm"
            found = await service.document("base", "a")
            assert found.status == "failed"
            why = "pipeline_parallel_size=2" if stages > 1 else "list segreuse_extras.compressed"
            assert why in (found.error or "")
            with pytest.raises(ConflictError, match=why):
                await kept(service, "a")
            assert not engine.asked

    asyncio.run(before())
    if stages == 1:
        request.getfixturevalue("nothing_compresses")
    asyncio.run(after())


def test_a_choice_that_cannot_be_written_leaves_nothing_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is given a document without its choice, and one that is warm is not warmed again."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        def full(*_: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(service.store, "keep", full)
            [added] = await service.add("base", body(a=TOKENS))
        assert (added.status, added.blocks, engine.pool.num_frozen) == ("failed", 1, 0)
        assert "disk is full" in (added.error or "")
        with pytest.raises(ConflictError, match="disk is full"):
            await kept(service, "a")
        [warmed] = await service.warm("base", WarmDocuments(wait=True))
        assert warmed.status == "warm"
        assert await kept(service, "a") == [40, 30, 60, 50]

    run(test)


# Entries.


def test_how_a_document_is_compressed_is_part_of_its_entry() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(a=TOKENS))
        await service.add("base", body(keep=0.25, b=TOKENS))
        await service.add("base", body(scorer="uniform", c=TOKENS))
        await service.add("base", body(keep=None, d=TOKENS))
        await service.add("base", body(e=TOKENS))
        found = await service.named([f"base/{i}" for i in "abce"], ["base"])
        assert len({document.entry for document in found}) == 3
        assert found[0].entry == found[3].entry
        assert len(engine.pool.warm()) == 4

    run(test)


def test_room_is_that_of_what_is_kept() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        tokens = [*range(100, 116)]
        await service.add("base", body(a=tokens))
        with pytest.raises(NoRoomError):
            await service.add("base", body(keep=0.75, b=[*range(200, 216)]))

    run(test, limit=4)


def test_the_choice_survives_eviction_and_restart(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "manifest"
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", body(a=TOKENS))
            before = await service.named(["base/a"], ["base"])
        engine = FakeEngine()
        async with serving(engine, path=path) as service:
            await service.finish()
            after = await service.named(["base/a"], ["base"])
            assert (after[0].entry, after[0].tokens.tolist()) == (
                before[0].entry,
                before[0].tokens.tolist(),
            )
            assert not any(SCORE in asked for _, asked, _ in engine.asked)
            engine.pool.release([after[0].entry])
            [warmed] = await service.warm("base", WarmDocuments(wait=True))
            assert warmed.status == "warm"
            assert not any(SCORE in asked for _, asked, _ in engine.asked)

    asyncio.run(main())


def test_prompts_that_have_become_too_short_are_a_fault(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "manifest"
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base", preamble="ab"))
            await service.add("base", body(a=TOKENS))
        short = SHAPE._replace(max_prompt_tokens=4)
        async with fake_engine.serving(FakeEngine(), short, path) as service:
            found = await service.document("base", "a")
            assert found.status == "failed"
            assert "prompts are too short" in (found.error or "")

    asyncio.run(main())


def test_a_torn_choice_is_a_fault(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "manifest"
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", body(a=TOKENS))
        with sqlite3.connect(path) as sql:
            sql.execute("UPDATE documents SET kept = ?", (np.array([0, 1], np.int32).tobytes(),))
        async with serving(FakeEngine(), path=path) as service:
            with pytest.raises(ConflictError, match="torn"):
                await kept(service, "a")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("its row is torn", "failed: its row is torn"),
        (None, "failed: it cannot be read from the manifest any more"),
    ],
)
def test_a_row_that_is_lost_while_it_serves_is_a_fault(
    fault: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(a=TOKENS))
        read = Store.document

        def torn(self: Store, *key: str) -> DocumentRecord | None:
            found = read(self, *key)
            assert found is not None
            return None if fault is None else replace(found, fault=fault)

        monkeypatch.setattr(Store, "document", torn)
        with pytest.raises(ConflictError, match=said):
            await kept(service, "a")

    run(test)


def test_the_same_again_keeps_its_choice() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(a=TOKENS))
        count = len(engine.asked)
        await service.add("base", body(a=TOKENS))
        assert len(engine.asked) == count
        assert await kept(service, "a") == [40, 30, 60, 50]
        await service.add("base", body(a=[*TOKENS[:-1], 99]))
        assert 99 in await kept(service, "a")

    run(test)


def test_a_choice_stays_when_its_document_is_added_with_those_in_front() -> None:
    """Another lead document gives it another context; `kb add` sends both."""

    async def main() -> None:
        engine = FakeEngine(limit=1000)
        shape = Shape(block_size=BLOCK_SIZE, max_prompt_tokens=400, chunk_tokens=200)
        async with fake_engine.serving(engine, shape) as service:
            await service.create_base(CreateBase(name="base"))
            leads = {f"lead{i}": [*range(100 + i, 140 + i)] for i in range(3)}
            await service.add("base", body(keep=None, **leads))
            await service.add("base", body(a=TOKENS))
            before = await kept(service, "a")
            [was] = await service.named(["base/a"], ["base"])
            engine.asked.clear()
            other = body(keep=None, lead0=[*range(300, 340)]).documents
            both = AddDocuments(documents=[*other, *body(a=TOKENS).documents], wait=True)
            await service.add("base", both)
            [found] = await service.named(["base/a"], ["base"])
            assert found.entry != was.entry, "it is in another context"
            assert await kept(service, "a") == before
            assert not any(SCORE in asked for _, asked, _ in engine.asked)
            await service.add("base", body(scorer="uniform", a=TOKENS))
            assert await kept(service, "a") == [10, 20, 60, 15], "as another scorer says"

    asyncio.run(main())


@pytest.mark.parametrize("chunk_tokens", [20, 3])
def test_a_choice_is_not_taken_over_where_documents_are_cut_otherwise(
    tmp_path: Path, chunk_tokens: int
) -> None:
    path = tmp_path / "manifest.sqlite"

    async def main() -> None:
        async with serving(FakeEngine(), path=path) as service:
            await service.create_base(CreateBase(name="base", context="none"))
            await service.add("base", body(a=TOKENS))
            before = await kept(service, "a")
        engine = FakeEngine()
        engine.answer = RuntimeError("nothing is chosen any more")
        shape = SHAPE._replace(chunk_tokens=chunk_tokens)
        async with fake_engine.serving(engine, shape, path) as service:
            await service.add("base", body(twin=TOKENS))
            if chunk_tokens == SHAPE.chunk_tokens:
                assert await kept(service, "twin") == before
            else:
                with pytest.raises(ConflictError, match="nothing is chosen"):
                    await kept(service, "twin")

    asyncio.run(main())


# Names.


def test_names_that_cannot_be_served_are_refused() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(a=TOKENS))
        await service.add("base", body(keep=None, text=TOKENS))
        await service.create_base(CreateBase(name="other"))
        for name, keys in (
            ("base/b", ["base"]),
            ("nobase/a", ["base"]),
            ("a", ["base"]),
            ("base/a", ["other"]),
            ("base/a", ["base", "more"]),
            ("base/a", []),
        ):
            with pytest.raises(NotFoundError, match="there is no document"):
                await service.named([name], keys)
        with pytest.raises(InvalidError, match="not compressed"):
            await service.named(["base/text"], ["base"])
        await service.delete("base", "a")
        with pytest.raises(NotFoundError, match="there is no document"):
            await service.named(["base/a"], ["base"])
        assert json.dumps(sorted(engine.pool.warm())) != "[]", "the text is still warm"
        assert len(engine.pool.warm()) == 1

    run(test)


def test_messages_name_a_document_of_a_folder_behind_vllms_filter_too() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(keep=None, **{"tmp/sub/t.txt": TOKENS}))
        engine.others = 1
        await service.add("base", body(wait=False, **{"sub/c.txt": TOKENS}))
        for name, said in (
            ("base/sub/c.txt", "the document 'base/sub%2Fc.txt': it is still being compressed"),
            ("base/sub/none.txt", "there is no document 'base/sub%2Fnone.txt'"),
            ("base/home/a", "there is no document 'base/home%2Fa'"),
            ("/usr/lib/5%", "there is no document '/usr%2Flib%2F5%25'"),
            ("none", "there is no document 'none'"),
            ("base/tmp/sub/t.txt", "the document 'base/tmp%2Fsub%2Ft.txt' is not compressed"),
        ):
            with pytest.raises(KnowledgeError) as refused:
                await service.named([name], ["base"])
            assert said in sanitize_message(str(refused.value))

    run(test)


def test_a_document_that_is_being_compressed_cannot_be_named_yet() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        engine.others = 1
        await service.add("base", body(wait=False, a=TOKENS))
        with pytest.raises(ConflictError, match="still being compressed"):
            await service.named(["base/a"], ["base"])
        engine.others = 0
        await service.finish()
        assert await kept(service, "a")

    run(test)


def test_a_request_that_names_documents_does_not_wait_for_texts_of_others() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", body(doc=[5, 6, 7]))
        is_reading, goes_on, waited = threading.Event(), threading.Event(), []

        def encode(text: str) -> list[int]:
            is_reading.set()
            waited.append(goes_on.wait(20))
            return [5]

        engine.encode = encode  # type: ignore[method-assign]
        more = AddDocuments.model_validate({"documents": [{"id": "more", "text": "long"}]})
        adding = asyncio.create_task(service.add("base", more))
        await asyncio.to_thread(is_reading.wait)
        assert await service.named(["base/doc"], ["base"])
        goes_on.set()
        await adding
        assert waited == [True]

    run(test)
