# SPDX-License-Identifier: Apache-2.0
"""Hundreds of requests by every policy, through a prefill and a decode engine: each answers as on
one engine, and approximate KV never has an exact name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Engine, Prompts, engine
from tests.e2e.stepping import resident
from tests.e2e.test_transfer import (
    LIMITS,
    OPTIONS,
    Case,
    beside,
    check_answer,
    documents,
    handed_over,
    mixed_prompts,
)

POLICIES = ("focus", "shift", "epic", "sparsex", "cacheblend", "prophet", "peaks", "exact")
NUM_EACH, NUM_PLAIN = 36, 24
HOLE = slice(1, 3)
"""Blocks of a prompt that are not there where `exact` is asked: it reuses what is behind them."""

pytestmark = pytest.mark.slow("312 requests, by every policy", instead="e2e/test_transfer")


def _cache(running: Engine, known: list[list[int]], prompt: list[int], policy: str | None) -> None:
    """Nothing but what a request reuses."""
    running.reset()
    if policy == "exact":
        running.ask(prompt, options=NAMESPACE, max_tokens=1)
        running.pool.evict_blocks({*resident(running, prompt)[HOLE]})
    elif policy is not None:
        running.ask(*known, options=NAMESPACE, max_tokens=1)


def _cases(running: Engine) -> Iterator[tuple[str | None, Case]]:
    """By policy; None: plain requests, half of which name no keys at all."""
    text = Prompts(running.vocab_size, seed=47)
    known = documents(text)
    wanted: list[tuple[str | None, list[int]]] = []
    for policy in POLICIES:
        wanted += [(policy, prompt) for prompt in mixed_prompts(text, known, NUM_EACH)]
    wanted += [(None, text.tokens(11 + 29 * number)) for number in range(NUM_PLAIN)]
    for number, (policy, prompt) in enumerate(wanted):
        options = OPTIONS | {"segreuse_policy": policy} if policy else [{}, OPTIONS][number % 2]
        running.reset()
        cold = running.ask(prompt)[0]
        _cache(running, known, prompt, policy)
        whole = running.ask(prompt, options=options)[0]
        _cache(running, known, prompt, policy)
        case = Case(prompt, options, whole, cold, policy == "focus" and number % 2 == 1)
        case.params = handed_over(running, prompt, options)
        running.check_idle()
        yield policy, case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("handed_over")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[tuple[str | None, Case]]:
    """Of a prefill engine that has gone since: vLLM has one connector per process."""
    with engine("qwen3", beside(folder, "kv_producer"), **LIMITS) as running:
        return list(_cases(running))


def test_many_requests_of_every_policy_answer_as_on_one_engine(
    cases: list[tuple[str | None, Case]], folder: Path, record_property: Any
) -> None:
    """And after each the decode engine names exactly the blocks in front of the approximate
    ones."""
    assert len(cases) >= 300
    same = []
    with engine("qwen3", beside(folder, "kv_consumer"), **LIMITS) as decoding:
        for _, case in cases:
            decoding.reset()
            answer = check_answer(decoding, folder, case)
            same.append(answer.logprobs == case.whole.logprobs)
    record_property("requests", len(same))
    record_property("answers that are the same to the last bit", sum(same))


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_each_policy_reuse_what_another_context_has_left(
    policy: str, cases: list[tuple[str | None, Case]]
) -> None:
    """Or the test above would show nothing. `exact` reuses what is exact where it comes from, and
    hands it over as approximate: nobody else could tell."""
    mine = [case for its, case in cases if its == policy]
    approximate = [case for case in mine if case.is_approximate]
    assert len(approximate) > 0.8 * NUM_EACH
    assert all(case.whole.report["reused_tokens"] for case in approximate)
    assert sum(case.exact >= BLOCK_SIZE for case in approximate) > 3
    differ = [case for case in approximate if case.whole.logprobs[0] != case.cold.logprobs[0]]
    if policy != "exact":
        assert len(differ) > 0.9 * len(approximate)


def test_plain_requests_are_exact_to_their_end(cases: list[tuple[str | None, Case]]) -> None:
    plain = [case for policy, case in cases if policy is None]
    assert len(plain) == NUM_PLAIN
    assert not any(case.is_approximate for case in plain)
