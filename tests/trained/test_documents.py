# SPDX-License-Identifier: Apache-2.0
"""Bases of a model that was trained on documents computed alone: whole, behind nothing."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segreuse_extras.trained import documents
from segreuse_extras.trained.documents import LaidOutDocuments
from segreuse_extras.trained.layout import Layout, Names, padded
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.errors import InvalidError
from vllm_segreuse.features.knowledge.isolated import isolated_documents
from vllm_segreuse.features.knowledge.schemas import AddDocuments, CreateBase
from vllm_segreuse.features.knowledge.service import KnowledgeService, start_service
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.plan import FreezeOrder

NAMES = Names(1, 2, "<s>", "</s>", "<{document}_{index}>")
LAYOUT = Layout(901, 902, ((903,), (904,)))
TOKENS = {"<s>": 901, "</s>": 902, "<1_1>": 903, "<2_1>": 904}


def encode(text: str) -> list[int]:
    parts = re.findall(r"<[^>]*>|.", text)
    return [TOKENS.get(part, 2 + ord(part[0]) % 800) for part in parts]


SHAPE = LaidOutDocuments(NAMES, LAYOUT, encode).shape(
    Shape(BLOCK_SIZE, max_prompt_tokens=41, chunk_tokens=8)
)


class Engine(FakeEngine):
    """Keeps the prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []

    encode = staticmethod(encode)  # type: ignore[assignment]

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        assert order.first_token == 0
        self.prompts.append(tokens)
        whole = tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]
        return await super().compute(whole, extra_key, order)


@asynccontextmanager
async def serving(engine: Engine, path: Path | str) -> AsyncIterator[KnowledgeService]:
    isolated = LaidOutDocuments(NAMES, LAYOUT, encode)
    service = KnowledgeService(engine, Store(str(path), "model"), SHAPE, 0.01, isolated)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def run(path: Path, work: Any) -> Engine:
    engine = Engine()

    async def test() -> None:
        async with serving(engine, path) as service:
            await work(service)

    asyncio.run(test())
    return engine


def adding(**documents: Any) -> AddDocuments:
    given = [{"id": name, **content} for name, content in documents.items()]
    return AddDocuments.model_validate({"documents": given, "wait": True})


def test_documents_are_computed_as_requests_look_for_them(tmp_path: Path) -> None:
    async def work(service: KnowledgeService) -> None:
        base, _ = await service.create_base(CreateBase(name="b"))
        assert base.context == "none"
        long, ids = {"text": "more than one chunk"}, {"token_ids": [5, 6]}
        found = await service.add("b", adding(short={"text": "ab"}, long=long, ids=ids))
        assert {document.status for document in found} == {"warm"}

    engine = run(tmp_path / "m", work)
    wanted = ["<s>ab</s>", "<s>more than one chunk</s>"]
    expected = [padded(encode(text), BLOCK_SIZE) for text in wanted]
    expected.append(padded([901, 5, 6, 902], BLOCK_SIZE))
    assert [tuple(prompt) for prompt in engine.prompts] == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [({"context": "siblings"}, "context"), ({"preamble": "Read this."}, "preamble")],
)
def test_nothing_stands_in_front_of_them(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    async def work(service: KnowledgeService) -> None:
        with pytest.raises(InvalidError, match="documents computed alone") as caught:
            await service.create_base(CreateBase(name="b", **options))
        assert caught.value.param == named
        assert (await service.bases(None, 9)).data == []

    run(tmp_path / "m", work)


@pytest.mark.parametrize(
    ("content", "named", "reason"),
    [
        ({"text": "a</s>b"}, "documents.1.text", "special tokens"),
        ({"text": "<s>a</s>"}, "documents.1.text", "special tokens"),
        ({"text": "see <2_1>"}, "documents.1.text", "special tokens"),
        ({"token_ids": [5, 903]}, "documents.1.token_ids", "special tokens"),
        ({"token_ids": [5] * 39}, "documents", "takes 45 .* 41 at most"),
    ],
)
def test_what_is_no_document_is_refused_and_nothing_added(
    tmp_path: Path, content: dict[str, Any], named: str, reason: str
) -> None:
    async def work(service: KnowledgeService) -> None:
        await service.create_base(CreateBase(name="b"))
        with pytest.raises(InvalidError, match=reason) as caught:
            await service.add("b", adding(good={"text": "ab"}, bad=content))
        assert caught.value.param == named
        assert (await service.documents("b", None, 9)).data == []

    assert run(tmp_path / "m", work).prompts == []


def test_a_base_of_another_time_is_not_computed(tmp_path: Path) -> None:
    """Its documents stood behind others."""

    async def before() -> None:
        shape = Shape(BLOCK_SIZE, max_prompt_tokens=80, chunk_tokens=80)
        service = KnowledgeService(FakeEngine(), Store(str(tmp_path / "m"), "model"), shape)
        await service.start()
        await service.create_base(CreateBase(name="old"))
        await service.add("old", adding(a={"text": "ab"}))
        await service.close()

    asyncio.run(before())

    async def work(service: KnowledgeService) -> None:
        (document,) = (await service.documents("old", None, 9)).data
        assert document.status == "failed"
        assert "documents computed alone" in (document.error or "")
        await service.finish()

    assert run(tmp_path / "m", work).prompts == []


def test_documents_that_no_longer_fit_fail_and_the_rest_is_there(tmp_path: Path) -> None:
    async def work(service: KnowledgeService) -> None:
        await service.create_base(CreateBase(name="b"))
        await service.add("b", adding(a={"text": "ab"}, b={"token_ids": [5] * 30}))

    run(tmp_path / "m", work)

    async def again() -> None:
        shape = SHAPE._replace(max_prompt_tokens=20)
        isolated = LaidOutDocuments(NAMES, LAYOUT, encode)
        store = Store(str(tmp_path / "m"), "model")
        service = KnowledgeService(Engine(), store, shape, 0.01, isolated)
        await service.start()
        found = {one.id: one for one in (await service.documents("b", None, 9)).data}
        assert found["b"].status == "failed"
        assert "too short" in (found["b"].error or "")
        assert found["a"].error is None
        await service.close()

    asyncio.run(again())


def test_only_models_that_say_so_have_documents_computed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordinary = SimpleNamespace(hf_config=SimpleNamespace())
    assert isolated_documents(ordinary, encode) is None
    monkeypatch.setattr(documents, "layout_of", lambda model_config: LAYOUT)
    monkeypatch.setattr(documents, "names_of", lambda model_config: NAMES)
    found = isolated_documents(ordinary, encode)
    assert found is not None
    assert found.shape(Shape(4, 16, 8)).stand_ins is None
    assert found.tokens("ab", None, "documents.0") == encode("<s>ab</s>")
    assert found.tokens(None, [5], "documents.0") == [901, 5, 902]


def test_a_text_without_tokens_is_no_document() -> None:
    without = LaidOutDocuments(NAMES, LAYOUT, lambda text: [901, 902])
    with pytest.raises(InvalidError, match="the text has no tokens") as caught:
        without.tokens("\u200b", None, "documents.4")
    assert caught.value.param == "documents.4.text"


@pytest.mark.parametrize("tokens", [[5, 6, 902], [901, 5, 6], [902, 5, 901], [5, 6]])
def test_a_tokenizer_that_loses_the_ends_of_a_document_makes_none(tokens: list[int]) -> None:
    other = LaidOutDocuments(NAMES, LAYOUT, lambda text: tokens)
    with pytest.raises(InvalidError, match="special tokens of documents"):
        other.tokens("ab", None, "documents.0")


def test_the_service_of_such_a_model_computes_its_documents_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "layout_of", lambda model_config: LAYOUT)
    monkeypatch.setattr(documents, "names_of", lambda model_config: NAMES)
    engine = Engine()

    async def test() -> None:
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=65, hf_config=SimpleNamespace(to_dict=dict)),
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        config = SegReuseConfig(knowledge_chunk_tokens=8)
        service = await start_service(engine, vllm_config, config)
        await service.create_base(CreateBase(name="b"))
        await service.add("b", adding(a={"token_ids": [5] * 30}))
        await service.close()

    asyncio.run(test())
    assert engine.prompts == [list(padded([901, *[5] * 30, 902], BLOCK_SIZE))]
