# SPDX-License-Identifier: Apache-2.0
"""Equal prompts at once share a plan, in a real engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same

pytestmark = pytest.mark.e2e

POLICIES = {
    "focus": {"segreuse_recompute_ratio": 0.2},
    "shift": {},
    "cacheblend": {},
    "sparsex": {},
}
N = 8


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine("qwen3", dtype="float32", max_model_len=2048) as running:
        yield running


class Steps:
    """Counts what the engine computes for prompts, in vLLM's forward and in our pass."""

    def __init__(self, running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = self.passes = 0
        schedule = running.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.forward += output.total_num_scheduled_tokens
            plans = getattr(output.kv_connector_metadata, "plans", ())
            self.passes += sum(plan.active_tokens for plan in plans)
            return output

        monkeypatch.setattr(running.scheduler, "schedule", counted)

    def take(self) -> int:
        """Tokens since this was last asked."""
        taken = self.forward + self.passes
        self.forward = self.passes = 0
        return taken


def options_of(policy: str) -> dict[str, Any]:
    least = {"segreuse_min_reused_tokens": BLOCK_SIZE}
    return NAMESPACE | least | {"segreuse_policy": policy} | POLICIES[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_n_answers_are_computed_as_one_and_are_those_of_one(
    policy: str, running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, options = Prompts(running.vocab_size, seed=90), options_of(policy)
    documents = [text.tokens(300) for _ in range(2)]
    prompt = text.around(*reversed(documents))
    found = {}
    for n in (1, N):
        running.reset()
        for document in documents:
            running.ask(document, options=options, max_tokens=1)
        steps = Steps(running, monkeypatch)
        answers = running.children(
            prompt, options, n=n, max_tokens=4, temperature=1.0, seed=n, ignore_eos=True
        )
        found[n] = answers, steps.take() - n * 3  # each generates three tokens behind the first
        monkeypatch.undo()
        running.check_idle()
    (one,), tokens = found[1]
    assert one.report["reused_tokens"] > 500
    assert found[N][1] == tokens + N - 1, "the others compute their last token"
    for answer in found[N][0]:  # what they sample differs
        mine, its = answer.logprobs[0], one.logprobs[0]
        assert len(mine.keys() & its.keys()) >= 8
        assert all(abs(mine[token] - its[token]) < 1e-4 for token in mine.keys() & its.keys())


def test_n_answers_of_one_token_are_computed_as_one(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has ended when the others are asked for."""
    text, options = Prompts(running.vocab_size, seed=91), options_of("focus")
    document, found = text.tokens(600), {}
    prompt = text.around(document)
    for n in (1, N):
        running.reset()
        running.ask(document, options=options, max_tokens=1)
        steps = Steps(running, monkeypatch)
        running.children(
            prompt, options, n=n, max_tokens=1, temperature=1.0, seed=n, ignore_eos=True
        )
        found[n] = steps.take()
        monkeypatch.undo()
        running.check_idle()
    assert found[N] - found[1] <= (N - 1) * BLOCK_SIZE, "the others compute a part of a block"


def test_equal_prompts_of_a_list_and_others_among_them(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.reset()
    text, options = Prompts(running.vocab_size, seed=91), options_of("shift")
    document = text.tokens(300)
    running.ask(document, options=options, max_tokens=1)
    one, other = text.around(document), text.around(document)
    sampling = {"max_tokens": 4, "ignore_eos": True}
    alone = running.ask(one, options=options, **sampling)[0]
    running.reset()
    running.ask(document, options=options, max_tokens=1)
    steps = Steps(running, monkeypatch)
    answers = running.ask(one, other, one, other, one, options=options, **sampling)
    computed = len(one) + len(other) - 2 * len(document)
    whole = 300 // BLOCK_SIZE * BLOCK_SIZE
    assert steps.take() - 5 * 3 <= computed + 2 * (300 - whole) + 3
    for number, answer in enumerate(answers):
        assert answer.report["bypass_reason"] is None
        if number in (2, 4):
            assert answer.report["new_tokens"] == 1
            assert answer.report["reused_tokens"] == len(one) - 1
        if number % 2 == 0:
            assert_same(answer, alone, 1e-4)
    running.check_idle()
