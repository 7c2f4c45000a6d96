# SPDX-License-Identifier: Apache-2.0
"""Models trained on documents computed alone answer as plain torch does with their mask."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams

from tests.e2e.engine import BF16_NOISE, BLOCK_SIZE, Answer, Engine, Prompts, engine
from tests.e2e.isolated_models import Reference, make_isolated, prompt_of
from vllm_segreuse.cache.links import MAX_VIEWS
from vllm_segreuse.prefill import executor
from vllm_segreuse.serve.offline import KnowledgeBase

BOUND = {"float32": 0.002, "bfloat16": BF16_NOISE}
OTHER_DTYPE = pytest.mark.slow("the other dtype", instead="e2e/test_isolated_documents")


class Served:
    def __init__(self, running: Engine, shape: str, link_tokens: int, dtype: str) -> None:
        self.engine = running
        self.reference = Reference(make_isolated(link_tokens, shape), dtype)
        self.bound = BOUND[dtype]
        self.text = Prompts(8000, seed=link_tokens)
        self.documents = [self.text.tokens(n) for n in (70, 3 * BLOCK_SIZE - 2, 41, 5)]

    def prompt(self, *numbers: int, head: int = 9) -> list[int]:
        documents = [self.documents[number] for number in numbers]
        return prompt_of(
            self.reference.layout, self.text.tokens(head), documents, self.text.tokens(12)
        )

    def ask(self, *prompts: list[int], options: dict[str, Any] | None = None) -> list[Answer]:
        options = {"extra_keys": ["mine"]} if options is None else options
        return self.engine.ask(*prompts, options=options, max_tokens=32, ignore_eos=True)

    def check(self, prompt: list[int], answer: Answer) -> None:
        assert len(answer.token_ids) == 32
        found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        wanted = self.reference.logprobs(prompt, answer.token_ids)
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        assert worst <= self.bound, f"log-probabilities differ by {worst}"


@pytest.fixture(
    scope="module",
    params=[
        *(("qwen3", 0, "float32"), ("qwen3", 1, "bfloat16"), ("qwen3", 5, "float32")),
        *(("llama", 1, "float32"), ("llama", 5, "bfloat16")),
        pytest.param(("qwen3", 0, "bfloat16"), marks=OTHER_DTYPE),
        pytest.param(("qwen3", 1, "float32"), marks=OTHER_DTYPE),
        pytest.param(("qwen3", 5, "bfloat16"), marks=OTHER_DTYPE),
    ],
    ids=lambda param: f"{param[0]}-link{param[1]}-{param[2]}",
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    shape, link_tokens, dtype = request.param
    with engine(shape, model=str(make_isolated(link_tokens, shape)), dtype=dtype) as running:
        yield Served(running, shape, link_tokens, dtype)


@pytest.fixture(autouse=True)
def _clean(served: Served) -> Iterator[None]:
    served.engine.reset()
    yield
    served.engine.check_idle()


@pytest.mark.shows("documents", by="served")
def test_cold_and_warm_in_any_order(served: Served) -> None:
    for numbers in [(0, 1, 2), (2, 0, 1), (1, 3), (0,)]:
        prompt = served.prompt(*numbers)
        (answer,) = served.ask(prompt)
        served.check(prompt, answer)
        reused = sum(len(served.documents[number]) + 2 for number in numbers)
        report = answer.report
        assert report["policy"] == "link"
        assert report["reused_tokens"] == report["exact_tokens"] == reused
        assert (report["recomputed_tokens"], report["drift"]) == (0, None)
        assert report["new_tokens"] == len(prompt) - reused


def test_a_document_at_the_start_is_its_own_prefix(served: Served) -> None:
    for numbers in [(1, 0), (1,), (1, 2)]:
        prompt = served.prompt(*numbers, head=0)
        (answer,) = served.ask(prompt)
        served.check(prompt, answer)
    assert answer.report["prefix_tokens"] > 0


def test_concurrent_requests_share_documents(served: Served) -> None:
    prompts = [served.prompt(*numbers) for numbers in [(0, 1), (1, 0), (2, 1, 0), (3, 2)]]
    for prompt, answer in zip(prompts, served.ask(*prompts), strict=True):
        served.check(prompt, answer)


def test_a_request_without_extra_keys_shares_with_nobody(served: Served) -> None:
    prompt = served.prompt(0, 2)
    for _ in range(2):
        (answer,) = served.ask(prompt, options={})
        served.check(prompt, answer)
        assert answer.report["reused_tokens"] > 0


def test_documents_of_a_knowledge_base_are_found(served: Served) -> None:
    base = KnowledgeBase(served.engine.llm, "handbook")
    try:
        added = base.add({str(n): tokens for n, tokens in enumerate(served.documents)})
        assert {document.status for document in added} == {"warm"}
        asked = [(2, 0), (3, 1, 2)]
        scheduler = served.engine.scheduler
        with patch.object(scheduler, "add_request", wraps=scheduler.add_request) as added:
            for numbers in asked:
                prompt = served.prompt(*numbers)
                (answer,) = served.ask(prompt, options={"extra_keys": ["handbook"]})
                served.check(prompt, answer)
                assert answer.report["matches"] == len(numbers)
        assert added.call_count == len(asked), "none was computed for a request"
        assert [document.hits for document in base.documents()] == [1, 1, 2, 1]
    finally:
        base.delete()


def test_more_namespaces_than_have_entries_of_a_block(served: Served) -> None:
    prompt = served.prompt(1)
    keys = [{"extra_keys": [f"tenant {number}"]} for number in range(MAX_VIEWS + 4)]
    answers = served.engine.ask(*[prompt] * len(keys), options=[*keys], max_tokens=1)
    assert all(answer.report["policy"] == "link" for answer in answers)
    for key in (keys[0], keys[-1]):
        (answer,) = served.ask(prompt, options=key)
        served.check(prompt, answer)


def test_a_plan_that_fails_is_no_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in full, documents would see each other."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        raise ArithmeticError("on purpose")

    prompt, options = served.prompt(0, 2), {"extra_keys": ["mine"]}
    monkeypatch.setattr(executor, "token_copies", broken)
    params = SamplingParams(max_tokens=1, extra_args=options)
    (output,) = served.engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, list(output.outputs[0].token_ids)) == ("error", [])
    (answer,) = served.ask(prompt)
    served.check(prompt, answer)


def test_what_another_layout_has_is_refused_before_it_is_computed(served: Served) -> None:
    layout = served.reference.layout
    for wrong in ([5, layout.end, 6], [layout.start, 5]):
        with pytest.raises(ValueError, match="documents: "):
            served.ask(wrong)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        served.engine.ask(served.prompt(0), prompt_logprobs=1)


def test_the_mask_matters(served: Served) -> None:
    prompt = served.prompt(0, 1, 2)
    (answer,) = served.ask(prompt)
    causal = served.reference.logprobs(prompt, answer.token_ids, isolated=False)
    found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert max(abs(a - b) for a, b in zip(found, causal, strict=True)) > 2 * served.bound
