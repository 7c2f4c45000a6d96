# SPDX-License-Identifier: Apache-2.0
"""A conversation with moved text is computed in full while the engine is idle."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same

pytestmark = pytest.mark.e2e

SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": BLOCK_SIZE}


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    options = {"heal_tokens": 3 * BLOCK_SIZE, "heal_after_s": 0.0}
    with engine("qwen3", dtype="float32", max_model_len=2048, segreuse=options) as running:
        yield running


def rest(running: Engine) -> int:
    """Nobody asks anything; returns the steps until there is nothing left to do."""
    steps = 0
    while running.scheduler.has_requests():
        running.llm.llm_engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("once", [False, True])
def test_after_a_rest_the_next_turn_has_an_exact_prefix(running: Engine, once: bool) -> None:
    """Also in place of what the turn before has left."""
    running.reset()
    text, options = Prompts(running.vocab_size, seed=85), SHIFT | {"segreuse_recompute_once": once}
    document = text.tokens(300)
    running.ask(document, options=options, max_tokens=1)
    prompt = text.around(document)
    first = running.ask(prompt, options=options, max_tokens=8, ignore_eos=True)[0]
    assert first.report["reused_tokens"] > 200
    assert rest(running) > len(prompt) / (3 * BLOCK_SIZE)
    known = len(prompt) + 8 - 1  # the last token was sampled, and not computed
    prompt = prompt + first.token_ids + text.tokens(70)
    healed = running.ask(prompt, options=options)[0]
    assert healed.report["prefix_tokens"] == known // BLOCK_SIZE * BLOCK_SIZE
    assert healed.report["reused_tokens"] == 0
    assert rest(running) <= 1, "it is exact as it is"
    running.check_idle()
    running.reset()
    assert_same(healed, running.ask(prompt)[0], 2e-3)


def test_who_comes_meanwhile_is_served(running: Engine) -> None:
    running.reset()
    text = Prompts(running.vocab_size, seed=86)
    document = text.tokens(300)
    running.ask(document, options=SHIFT, max_tokens=1)
    running.ask(text.around(document), options=SHIFT, max_tokens=4)
    running.llm.llm_engine.step()  # a part is under way, or done
    other = text.tokens(200)
    mine = running.ask(other, options=SHIFT)[0]
    assert rest(running) > 1
    running.check_idle()
    running.reset()
    assert_same(mine, running.ask(other)[0], 2e-3)
