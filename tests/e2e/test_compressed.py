# SPDX-License-Identifier: Apache-2.0
"""Compressed documents in an engine: their KV is that of the kept tokens among all of them."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.parts import parts_of
from tests.reports import Whole
from vllm_segreuse.features.knowledge.engine import answer_of, own_parameters
from vllm_segreuse.features.knowledge.naming import NamedDocument
from vllm_segreuse.features.knowledge.schemas import NewDocument
from vllm_segreuse.prefill import executor
from vllm_segreuse.serve.offline import KnowledgeBase, OfflineEngine

pytestmark = pytest.mark.e2e

BOUND = 0.002

OF_TEXT = {"segreuse_min_reused_tokens": 1}
"""Of requests that name no document: one is reused however short it is."""


class Reference:
    """The model in plain torch, in full; what is dropped of a document is seen by it alone."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logprobs(
        self, parts: Sequence[list[int] | tuple[list[int], list[int]]], answer: list[int]
    ) -> list[float]:
        """Of each token of the answer.

        Args:
            parts: of the prompt: tokens, or a document and the positions of it that are kept.
        """
        import torch
        from transformers import DynamicCache

        cache, place = DynamicCache(), 0
        for part in parts:
            if isinstance(part, tuple):
                self._add_document(cache, *part, place)
                place += len(part[1])
            else:
                ids = torch.tensor([part])
                where = torch.arange(place, place + len(part))[None]
                with torch.no_grad():
                    out = self._model(ids, position_ids=where, past_key_values=cache)
                place += len(part)
        last = out.logits[0, -1:]
        with torch.no_grad():
            where = torch.arange(place, place + len(answer))[None]
            out = self._model(torch.tensor([answer]), position_ids=where, past_key_values=cache)
        found = torch.cat([last, out.logits[0, :-1]]).float().log_softmax(-1)
        return found[torch.arange(len(answer)), torch.tensor(answer)].tolist()

    def _add_document(self, cache: Any, document: list[int], kept: list[int], place: int) -> None:
        """Computed alone, once for each shift: RoPE is relative, so a shift of all of it is one."""
        import torch
        from transformers import DynamicCache

        shifts: dict[int, Any] = {}
        for at, position in enumerate(kept):
            shift = place + at - position
            if shift not in shifts:
                alone = shifts[shift] = DynamicCache()
                where = torch.arange(len(document))[None] + shift
                with torch.no_grad():
                    self._model(torch.tensor([document]), position_ids=where, past_key_values=alone)
            for layer, of_alone in enumerate(shifts[shift].layers):
                one = slice(position, position + 1)
                cache.update(of_alone.keys[:, :, one], of_alone.values[:, :, one], layer)


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    options = {"frozen_share": 0.5, "policy": "shift"}
    options["knowledge_chunk_tokens"] = 64
    # A chunk and its probes are more than vLLM computes in a step.
    budget = {"max_num_batched_tokens": 128, "max_num_seqs": 16}
    with engine("qwen3", options, dtype="float32", **budget) as started:
        yield started


@pytest.fixture(scope="module")
def reference(running: Engine) -> Reference:
    return Reference(running.llm.llm_engine.model_config.model)


@pytest.fixture
def base(running: Engine) -> Iterator[KnowledgeBase]:
    base = KnowledgeBase(running.llm, "handbook", context="none")
    yield base
    base.delete()
    running.check_idle()


def add(base: KnowledgeBase, keep: float, scorer: Any, **documents: list[int]) -> None:
    found = base.add(
        [
            NewDocument(id=name, token_ids=ids, keep=keep, scorer=scorer)
            for name, ids in documents.items()
        ]
    )
    assert [(document.status, document.error) for document in found] == [
        ("warm", None) for _ in documents
    ]


def ask(
    running: Engine, prompt: list[int], *documents: NamedDocument, keys: str = "handbook"
) -> Answer:
    asked = {"segreuse_documents": [it.entry for it in documents]} if documents else OF_TEXT
    options = {"extra_keys": [keys], **asked}
    [answer] = running.ask(prompt, options=options, max_tokens=16, ignore_eos=True)
    return answer


def test_answers_are_those_of_the_kept_kv(
    running: Engine, reference: Reference, base: KnowledgeBase
) -> None:
    """Of a document of several chunks and another one, in either order."""
    dice = random.Random(3)
    first, second = (dice.sample(range(16, 4000), n) for n in (90, 40))
    add(base, 0.4, "attention", a=first)
    add(base, 0.5, "surprise", b=second)
    a, b = base.named("a"), base.named("b")
    assert (len(a.tokens), len(b.tokens)) == (36, 20), "two chunks of 45 tokens, and one"
    text = Prompts(4000, seed=8)
    head, gap, question = text.tokens(9), text.tokens(5), text.tokens(12)
    prompt = [*head, *b.tokens.tolist(), *gap, *a.tokens.tolist(), *question]
    answer = ask(running, prompt, b, a)
    assert answer.report["reused_tokens"] == 56
    halves = (first[:45], first[45:])
    kept = [(part, [part.index(t) for t in a.tokens.tolist() if t in part]) for part in halves]
    also = (second, [second.index(t) for t in b.tokens.tolist()])
    wanted = reference.logprobs([head, also, gap, *kept, question], answer.token_ids)
    found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert max(abs(x - y) for x, y in zip(found, wanted, strict=True)) <= BOUND
    again = ask(running, prompt, b, a)
    assert (again.token_ids, again.report["reused_tokens"]) == (answer.token_ids, 56)
    assert again.report["prefix_tokens"] == 0, "what is behind a document has no exact name"


def test_a_copy_is_kept_beside_a_request_that_reuses(
    running: Engine, reference: Reference, base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where any request of a step has KV moved, all is moved before the model runs."""
    text = Prompts(4000, seed=14)
    known, document = text.tokens(2 * BLOCK_SIZE), text.tokens(40)
    running.ask(known, options=NAMESPACE)
    from vllm import SamplingParams

    other = SamplingParams(max_tokens=1, extra_args=NAMESPACE | OF_TEXT)
    reports = []

    async def answers(self: Any, tokens: list[int], asked: Any, **sampling: Any) -> list[Any]:
        client = {"prompt_token_ids": [7, *known, 9]}
        with own_parameters(asked, **sampling) as params:
            prompts = [client, {"prompt_token_ids": tokens}]
            both = running.llm.generate(prompts, [other, params], use_tqdm=False)
        reports.append(Whole(both[0].kv_transfer_params["segreuse"]))
        return [answer_of(both[1], tokens)]

    monkeypatch.setattr(OfflineEngine, "answers", answers)
    add(base, 0.5, "attention", a=document)
    assert [report["reused_tokens"] for report in reports] == [2 * BLOCK_SIZE] * 3
    check_kept(running, reference, base, document, text)


def test_a_copy_that_failed_is_made_again(
    running: Engine, reference: Reference, base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kept tokens were computed as a text, which is not their KV."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        raise ArithmeticError("on purpose")

    document = Prompts(4000, seed=12).tokens(40)
    monkeypatch.setattr(executor, "token_copies", broken)
    add(base, 0.5, "uniform", a=document)
    assert executor.token_copies is not broken, "it was the copy"
    check_kept(running, reference, base, document, Prompts(4000, seed=13))


def check_kept(
    running: Engine, reference: Reference, base: KnowledgeBase, document: list[int], text: Prompts
) -> None:
    """A prompt with half of a document answers as with the KV of its kept tokens."""
    a = base.named("a")
    head, question = text.tokens(9), text.tokens(12)
    answer = ask(running, [*head, *a.tokens.tolist(), *question], a)
    assert answer.report["reused_tokens"] == 20
    kept = [document.index(token) for token in a.tokens.tolist()]
    wanted = reference.logprobs([head, (document, kept), question], answer.token_ids)
    found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert max(abs(x - y) for x, y in zip(found, wanted, strict=True)) <= BOUND


def test_attention_and_surprise_choose_by_the_model(running: Engine, base: KnowledgeBase) -> None:
    """Of a text with one passage that it repeats, the model is least surprised there."""
    document = Prompts(4000, seed=5).tokens(64)
    chosen = {}
    for scorer in ("attention", "surprise", "uniform"):
        add(base, 0.25, scorer, **{scorer: document})
        chosen[scorer] = base.named(scorer).tokens.tolist()
        assert len(chosen[scorer]) == 16
        places = [document.index(token) for token in chosen[scorer]]
        assert places == sorted(places)
    assert len({tuple(tokens) for tokens in chosen.values()}) == 3


def test_nobody_else_gets_a_document(running: Engine, base: KnowledgeBase) -> None:
    """Not without its name, in another namespace, nor after it was deleted."""
    document = Prompts(4000, seed=6).tokens(3 * BLOCK_SIZE)
    add(base, 0.9, "uniform", a=document)
    one = base.named("a")
    prompt = [*one.tokens.tolist(), *Prompts(4000, seed=7).tokens(9)]
    entries = parts_of(running.scheduler.connector.scheduler_side).entries

    def is_read(text: list[int], *named: NamedDocument, keys: str = "handbook") -> bool:
        entries.take_uses()
        ask(running, text, *named, keys=keys)
        return one.entry in entries.take_uses()

    assert ask(running, prompt).report["reused_tokens"] == 0, "found by its kept tokens"
    assert ask(running, document + prompt[-9:]).report["reused_tokens"] == 0, "found by its text"
    other = [*prompt]
    other[5] += 1
    assert not is_read(other, one), "other tokens"
    assert not is_read(prompt, one, keys="others"), "another namespace"
    assert not is_read(prompt)
    assert ask(running, prompt).report["prefix_tokens"] == 3 * BLOCK_SIZE, "it is in the cache"
    assert is_read(prompt, one), "a prefix hit of its kept tokens as a text"
    assert is_read(prompt[:50] + prompt, one)
    base.remove("a")
    assert not is_read(prompt, one), "deleted"


def test_an_evicted_document_returns_when_it_is_named(running: Engine, base: KnowledgeBase) -> None:
    add(base, 0.5, "attention", a=Prompts(4000, seed=9).tokens(90))
    one = base.named("a")
    prompt = [*one.tokens.tolist(), *Prompts(4000, seed=7).tokens(9)]
    before = ask(running, prompt, one)
    assert before.report["reused_tokens"] == 46
    running.reset()
    assert {document.status for document in base.documents()} == {"cold"}
    assert ask(running, prompt, one).report["reused_tokens"] == 0
    assert {document.status for document in base.warm()} == {"warm"}
    after = ask(running, prompt, one)
    assert (after.report["reused_tokens"], after.token_ids) == (46, before.token_ids)
    entries = parts_of(running.scheduler.connector.scheduler_side).entries
    entries.make_free(1)
    assert one.entry not in entries
    assert entries.wanted() == []
    ask(running, prompt, one)
    assert entries.wanted() == [one.entry]
    base.documents()  # the service reads of it
    base.remove()  # nothing; it waits until nothing is to be computed any more
    assert ask(running, prompt, one).report["reused_tokens"] == 46
