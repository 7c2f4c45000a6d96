# SPDX-License-Identifier: Apache-2.0
"""Compressed documents of a model that was trained on anchors: answers are the model's own."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.quality.condensed import AnchorReference
from tests.e2e.engine import Answer, Engine, Prompts, engine
from tests.e2e.isolated_models import layout_of, make_isolated, prompt_of
from tests.parts import parts_of
from vllm_segreuse.features.knowledge.naming import NamedDocument
from vllm_segreuse.prefill import executor
from vllm_segreuse.serve.offline import KnowledgeBase

pytestmark = pytest.mark.e2e

BOUND = 0.002
LINK_TOKENS, CHUNK, ANCHORS = 2, 16, 8
LENGTHS = {"a": 70, "b": 5, "c": 3 * CHUNK, "d": CHUNK}


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    model = str(make_isolated(LINK_TOKENS, anchors=(CHUNK, ANCHORS)))
    with engine("qwen3", {"frozen_share": 0.5}, model=model, dtype="float32") as started:
        yield started


class Asker:
    """Documents of a base, and prompts about them."""

    def __init__(self, running: Engine) -> None:
        folder = make_isolated(LINK_TOKENS, anchors=(CHUNK, ANCHORS))
        self.layout, self.reference = layout_of(folder), AnchorReference(folder)
        self.text = Prompts(8000, seed=33)
        self.texts = {name: self.text.tokens(length) for name, length in LENGTHS.items()}
        self.base = KnowledgeBase(running.llm, "handbook")
        self.running = running

    def named(self, *names: str) -> list[NamedDocument]:
        return [self.base.named(name) for name in names]

    def prompt(self, documents: list[NamedDocument]) -> tuple[list[int], list[int], list[int]]:
        """Its text in front, the whole of it, and the question."""
        layout, head, question = self.layout, self.text.tokens(9), self.text.tokens(12)
        prompt = prompt_of(layout, head, [it.tokens.tolist() for it in documents], question)
        return head, prompt, question

    def ask(self, *names: str) -> Answer:
        """An answer whose log-probabilities are those of plain torch."""
        documents = self.named(*names)
        head, prompt, question = self.prompt(documents)
        options: dict[str, Any] = {"extra_keys": ["handbook"]}
        options["segreuse_documents"] = [document.entry for document in documents]
        (answer,) = self.running.ask(prompt, options=options, max_tokens=16, ignore_eos=True)
        found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        texts = [self.texts[name] for name in names]
        wanted = self.reference.of_documents(head, texts, question, answer.token_ids)
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= BOUND
        report = answer.report
        assert report["policy"] == "link"
        assert report["reused_tokens"] == sum(len(document.tokens) + 2 for document in documents)
        assert report["exact_tokens"] == report["reused_tokens"]
        return answer


@pytest.fixture
def asker(running: Engine) -> Iterator[Asker]:
    made = Asker(running)
    yield made
    made.base.delete()
    running.check_idle()


@pytest.mark.shows("anchors", family="qwen3")
def test_answers_are_the_models_own_in_any_order(asker: Asker) -> None:
    added = asker.base.add(asker.texts)
    assert {document.status for document in added} == {"warm"}
    counts = {name: len(asker.base.named(name).tokens) for name in LENGTHS}
    assert counts == {"a": 35, "b": 3, "c": 24, "d": 8}
    assert [document.blocks for document in added] == [2, 1, 1, 1], "half of the text's"
    asker.ask("a", "b", "c", "d")
    asker.ask("d", "c", "b", "a")
    assert asker.ask("c").report["prefix_tokens"] == 0
    asker.ask("c")


def test_chunks_whose_anchors_were_not_copied_are_computed_again(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed behind anchors as behind a text, they would be others."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(executor, "token_copies", broken)
    asker.base.add({"a": asker.texts["a"]})
    assert executor.token_copies is not broken, "it was a chunk"
    asker.ask("a")


def test_an_evicted_document_is_computed_for_who_names_it(asker: Asker) -> None:
    asker.base.add(asker.texts)
    entries = parts_of(asker.running.scheduler.connector.scheduler_side).entries
    entries.make_free(1)
    assert len(entries.warm()) < len(LENGTHS)
    asker.ask("d", "c", "b", "a")
    asker.running.reset()
    asker.ask("a", "c")


def test_a_request_without_its_documents_ends_with_an_error(asker: Asker) -> None:
    asker.base.add(asker.texts)
    a, d = asker.named("a", "d")
    _, prompt, _ = asker.prompt([a, d])
    mine = {"extra_keys": ["handbook"], "segreuse_documents": [a.entry, d.entry]}
    for wrong in ({"segreuse_documents": [d.entry, a.entry]}, {"extra_keys": ["other"]}):
        [answer] = asker.running.ask(prompt, options=mine | wrong)
        assert answer.token_ids == []
    with pytest.raises(ValueError, match="the prompt has 2, and the request names 1"):
        asker.running.ask(prompt, options=mine | {"segreuse_documents": [a.entry]})
    asker.ask("a", "d")


def test_texts_and_anchors_elsewhere_are_refused(asker: Asker) -> None:
    layout, text = asker.layout, asker.text
    assert layout.anchors is not None
    document = [layout.start, *text.tokens(9), layout.end, *layout.links[0]]
    for prompt, reason in (
        ([*document, *text.tokens(5)], "compressed documents only"),
        ([*text.tokens(5), layout.anchors.tokens[0], *text.tokens(5)], "an anchor token outside"),
    ):
        with pytest.raises(ValueError, match=reason):
            asker.running.ask(prompt, options={"extra_keys": ["handbook"]})
    [answer] = asker.running.ask(text.tokens(40), options={"extra_keys": ["handbook"]})
    assert answer.report["bypass_reason"] == "no_documents"
