# SPDX-License-Identifier: Apache-2.0
"""With `context=same`, an answer carries nothing of what was taken out of the prompt."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.test_conversation import apart

pytestmark = pytest.mark.e2e

ANY = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": BLOCK_SIZE}
SAME = ANY | {"segreuse_context": "same"}


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine("qwen3", dtype="float32", max_model_len=2048) as running:
        yield running


def distances(answers: list[Answer]) -> list[float]:
    """Of each answer's first token from that of the last one, which is right."""
    *others, full = (answer.logprobs[0] for answer in answers)
    return [apart(one, full) for one in others]


def edited(running: Engine, before: list[int], after: list[int]) -> list[Answer]:
    """The edited prompt under `same`, under `any`, and by full prefill."""
    answers = []
    for options in (SAME, ANY):
        running.reset()
        running.ask(before, options=NAMESPACE, max_tokens=1)
        answers.append(running.ask(after, options=options)[0])
    running.reset()
    return [*answers, running.ask(after)[0]]


def test_behind_a_dropped_thought_everything_is_computed(running: Engine) -> None:
    text = Prompts(running.vocab_size, seed=11)
    system, thought, rest = text.tokens(96), text.tokens(80), text.tokens(640)
    answers = edited(running, system + thought + rest, system + rest + text.tokens(40))
    same, moved, _ = answers
    assert same.report["prefix_tokens"] == moved.report["prefix_tokens"] == len(system)
    assert same.report["reused_tokens"] == 0
    assert same.report["bypass_reason"] == "too_few_reused_tokens"
    assert same.report["other_context_tokens"] >= moved.report["reused_tokens"] > 600
    of_same, of_any = distances(answers)
    assert of_same < 1e-3 < of_any / 10


def test_behind_new_text_everything_is_reused(running: Engine) -> None:
    text = Prompts(running.vocab_size, seed=12)
    system, rest = text.tokens(96), text.tokens(640)
    after = system + text.tokens(80) + rest + text.tokens(40)
    same, moved, _ = edited(running, system + rest, after)
    assert same.report["reused_tokens"] == moved.report["reused_tokens"] > 600
    assert "other_context_tokens" not in same.report
    assert same.token_ids == moved.token_ids
    running.check_idle()
