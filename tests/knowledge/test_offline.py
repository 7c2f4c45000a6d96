# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases within a program: the same service, on a loop of its own, during calls only."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace as Of
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse import kv_transfer_config
from vllm_segreuse.features.knowledge import siblings
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.errors import ConflictError, NoRoomError
from vllm_segreuse.features.knowledge.schemas import NewDocument
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.serve import offline
from vllm_segreuse.serve.offline import KnowledgeBase


class LLM:
    """Stands for `vllm.LLM`: only its options are asked for here."""

    def __init__(self, transfer: KVTransferConfig | None) -> None:
        self.llm_engine = Of(
            vllm_config=Of(kv_transfer_config=transfer),
            tokenizer=None,
            model_config=Of(get_vocab_size=lambda: 1000),
        )


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engine, loop = FakeEngine(), asyncio.new_event_loop()
    shape = Shape(BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)
    service = KnowledgeService(engine, Store(IN_MEMORY, "model"), shape)

    async def start_service(*_: Any) -> KnowledgeService:
        await service.start(in_background=False)
        return service

    monkeypatch.setattr(offline, "start_service", start_service)
    monkeypatch.setattr(offline.asyncio, "new_event_loop", lambda: loop)
    monkeypatch.setattr(offline, "MAX_DOCUMENTS", 3)
    llm: Any = LLM(kv_transfer_config())
    llm.engine, llm.service = engine, service
    yield llm
    loop.close()


def test_all_that_a_call_moves_is_warm_when_it_returns(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between calls nothing runs that could compute it."""
    monkeypatch.setattr(siblings, "MIN_TOKENS", 3)
    llm.engine.others = 1  # one document at a time, so that what is not waited for is not there
    base = KnowledgeBase(llm, "handbook")
    base.add({"a": [5, 6, 7, 8], "short": [5, 6]})
    base.add({"b": [6, 7, 8, 9]})
    assert len(llm.engine.computed) == 5
    assert {d.status for d in base.documents()} == {"warm"}
    base.remove("a")
    assert {d.status for d in base.documents()} == {"warm"}
    alone = KnowledgeBase(llm, "alone", context="none")
    alone.add({"a": [5, 6, 7, 8], "b": [6, 7, 8, 9]})
    assert len(llm.engine.computed) == 5 + 2 + 2


def test_documents_are_warm_when_the_call_returns(llm: Any) -> None:
    base = KnowledgeBase(llm, "handbook", metadata={"v": 1})
    assert base.extra_key == "handbook"
    added = base.add({"a.txt": "text", "b": [5, 6, 7]})
    assert [(d.id, d.status, d.tokens) for d in added] == [("a.txt", "warm", 4), ("b", "warm", 3)]
    assert base.stats().documents.warm == 2
    llm.engine.pool.reset()
    assert [d.status for d in base.documents()] == ["cold", "cold"]
    assert [d.id for d in base.warm(["b"])] == ["b"]
    assert [d.status for d in base.documents()] == ["cold", "warm"]
    assert {d.status for d in base.warm()} == {"warm"}
    base.remove("b", "b")
    assert [d.id for d in base.documents()] == ["a.txt"]
    base.delete()
    assert base.stats().bases == 0


def test_a_document_is_shown_and_a_compressed_one_named(llm: Any) -> None:
    base = KnowledgeBase(llm, "handbook", extra_key="key", context="none")
    base.add({"a.txt": "text"})
    shown = base.text("a.txt")
    assert (shown.id, shown.base, shown.text, shown.is_exact) == ("a.txt", "handbook", "text", True)
    base.add([NewDocument(id="half", token_ids=[10, 40, 20, 30], keep=0.5)])
    found = base.named("half")
    assert (found.name, found.tokens.tolist()) == ("handbook/half", [40, 30])
    assert found.entry in llm.engine.pool.warm()


def test_more_documents_than_a_request_takes_come_in_several(llm: Any) -> None:
    base = KnowledgeBase(llm, "handbook")
    added = base.add({str(n): [n, 1] for n in range(8)})
    assert [d.id for d in added] == [str(n) for n in range(8)]
    assert [d.id for d in base.documents()] == [str(n) for n in range(8)]


def test_a_batch_that_does_not_fit_is_not_added_and_those_before_it_are(llm: Any) -> None:
    base = KnowledgeBase(llm, "handbook")
    small = {str(n): [n, 1] for n in range(4)}
    with pytest.raises(NoRoomError):
        base.add(small | {"large": [1] * 500})
    assert {d.id: d.status for d in base.documents()} == dict.fromkeys("012", "warm")


def test_what_was_used_is_written_within_each_call(llm: Any) -> None:
    base = KnowledgeBase(llm, "handbook")
    base.add({"a": [1, 2]})
    [entry] = llm.engine.pool.warm()
    llm.engine.use(entry)
    assert base.documents()[0].hits == 1
    assert llm.service.store.load().uses[entry][0] == 1


def test_errors_are_the_services_and_a_base_is_opened_once(llm: Any) -> None:
    base = KnowledgeBase(llm, "handbook", extra_key="key")
    assert KnowledgeBase(llm, "handbook", extra_key="key").extra_key == "key"
    with pytest.raises(ConflictError):
        KnowledgeBase(llm, "handbook", extra_key="other")
    with pytest.raises(NoRoomError):
        base.add({"a": [1] * 500})
    with pytest.raises(ValueError, match="name"):
        KnowledgeBase(llm, "a b")


def test_an_llm_without_reuse_is_refused() -> None:
    llm: Any = LLM(None)
    with pytest.raises(ValueError, match="does not run segment reuse"):
        KnowledgeBase(llm, "handbook")
