# SPDX-License-Identifier: Apache-2.0
"""A conversation that goes on: of its own history nothing is computed again."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same

pytestmark = pytest.mark.e2e

EXPLAINED = NAMESPACE | {"segreuse_explain": True, "segreuse_min_reused_tokens": BLOCK_SIZE}
TURNS = 7
"""More than `max_provenance_depth`."""


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine("qwen3", dtype="float32", max_model_len=2048) as running:
        yield running


class Conversation:
    """Documents in front that were computed elsewhere, then questions and answers."""

    def __init__(self, running: Engine, seed: int) -> None:
        running.reset()
        self.running, self.text = running, Prompts(running.vocab_size, seed=seed)
        documents = [self.text.tokens(200), self.text.tokens(96)]
        running.ask(*documents, options=NAMESPACE, max_tokens=1)
        self.history = self.text.around(*documents)

    def turn(self, **options: Any) -> Answer:
        answer = self.running.ask(
            self.history, options=EXPLAINED | options, max_tokens=8, ignore_eos=True
        )[0]
        self.history = self.history + answer.token_ids + self.text.tokens(70)
        return answer


def stretches(answer: Answer, in_context: bool) -> list[dict[str, Any]]:
    found = [each for each in answer.report["explain"] if each["source"] == "segment"]
    return [each for each in found if ("in_context" in each) is in_context]


def again(found: list[dict[str, Any]]) -> int:
    """Tokens that are computed again; 0 where only the workers know which (`sparsex`)."""
    return sum(tokens for each in found for _, tokens in each["recomputed"] or ())


@pytest.mark.parametrize("policy", ["focus", "prophet", "sparsex", "epic", "cacheblend"])
def test_of_the_own_history_nothing_is_computed_again(running: Engine, policy: str) -> None:
    conversation = Conversation(running, seed=81)
    options = {"segreuse_policy": policy, "segreuse_overflow_tokens": 0}
    options["segreuse_recompute_ratio"] = 0.2  # the default's own is all of so little
    first = conversation.turn(**options)
    assert not stretches(first, in_context=True)
    moved = first.report["recomputed_tokens"]
    assert moved > 0
    for turn in range(1, TURNS):
        answer = conversation.turn(**options)
        own = stretches(answer, in_context=True)
        # Whole blocks behind the documents, all but those of the newest text.
        assert sum(each["tokens"] for each in own) >= (turn - 1) * 78 - BLOCK_SIZE
        assert again(own) == 0
        assert answer.report["recomputed_tokens"] <= moved + BLOCK_SIZE
        assert answer.report["new_tokens"] <= 78 + 3 * BLOCK_SIZE
    running.check_idle()


def test_with_everything_recomputed_it_equals_full_prefill(running: Engine) -> None:
    conversation = Conversation(running, seed=82)
    conversation.turn(segreuse_policy="shift")
    conversation.turn(segreuse_policy="shift")
    prompt = conversation.history
    everything = EXPLAINED | {"segreuse_recompute_ratio": 1.0}
    ours = running.ask(prompt, options=everything)[0]
    assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] > 300
    running.reset()
    assert_same(ours, running.ask(prompt)[0], 2e-3)


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Largest difference of two tokens' log-probabilities."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())


def test_what_an_earlier_turn_has_left_is_used_as_it_is(running: Engine) -> None:
    """A turn that begins with the answer of the one before must go on as that did."""
    options: dict[str, Any] = {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.2}
    for once in (True, False):
        conversation = Conversation(running, seed=83)
        prompt, options["segreuse_recompute_once"] = conversation.history, once
        first = conversation.turn(**options)
        assert first.report["recomputed_tokens"] > 0
        continued = prompt + first.token_ids[:5]
        second = running.ask(continued, options=EXPLAINED | options, max_tokens=1)[0]
        off = apart(second.logprobs[0], first.logprobs[5])
        if once:
            assert off < 2e-3
            assert second.report["recomputed_tokens"] == 0
            assert second.report["reused_tokens"] >= len(prompt) - BLOCK_SIZE
        else:
            assert off > 1e-2, "the policy chooses for another question"
            assert second.report["recomputed_tokens"] > 0
    running.check_idle()


def test_what_was_kept_is_computed_again_where_everything_is(running: Engine) -> None:
    conversation = Conversation(running, seed=84)
    once = {"segreuse_policy": "shift", "segreuse_recompute_once": True}
    conversation.turn(**once)
    conversation.turn(**once)
    prompt = conversation.history
    everything = EXPLAINED | once | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 1.0}
    ours = running.ask(prompt, options=everything)[0]
    assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] > 300
    running.reset()
    assert_same(ours, running.ask(prompt)[0], 2e-3)
