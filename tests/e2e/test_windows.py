# SPDX-License-Identifier: Apache-2.0
"""Models some of whose layers attend to a window: what they answer when everything is recomputed is
in test_equality.py; here is the rest."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import NAMESPACE, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same, prompts_for
from tests.e2e.test_policies import check_drift, check_reported_work
from tests.e2e.test_spread import NOISE, check_exact_tier, check_spread

AT_PUSH = "gemma3"
MORE_SHAPES = pytest.mark.slow("another shape", instead="e2e/test_windows")
SHAPES = ("gemma3", "gemma2", "gemma4", "olmo3", "cohere2", "gpt_oss")


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=[] if s == AT_PUSH else MORE_SHAPES) for s in SHAPES],
)
def windowed(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"spread_tokens": 48, "max_provenance_depth": 0}
    with engine(request.param, segreuse=options, dtype="float32", max_model_len=1024) as started:
        yield started
        started.check_idle()


@pytest.fixture(autouse=True)
def forgotten(windowed: Engine) -> None:
    windowed.reset()


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("policy", ["sparsex", "cacheblend", "prophet", "focus"])
def test_the_reported_work_is_the_work_done(
    windowed: Engine, policy: str, dense_layers: int
) -> None:
    """The scheduler's side knows from the workers which layers give the scores."""
    check_reported_work(windowed, policy, dense_layers)


def test_above_its_drift_a_request_is_computed_in_full(windowed: Engine) -> None:
    check_drift(windowed, "focus")


@pytest.mark.shows("window", by="windowed")
@pytest.mark.parametrize("policy", ["shift", "focus"])
def test_a_token_far_behind_moved_text_answers_as_before(windowed: Engine, policy: str) -> None:
    """A prompt that is one whole document is moved by nothing: its reuse is exact."""
    document, *_ = prompts_for(windowed.vocab_size)[0]
    prompt = document + Prompts(windowed.vocab_size, seed=3).tokens(150)
    options = NAMESPACE | {"segreuse_policy": policy}
    [expected] = windowed.ask(prompt)
    windowed.reset()
    windowed.ask(document, options=options, max_tokens=1)
    [found] = windowed.ask(prompt, options=options)
    assert_same(found, expected, noise=NOISE)


@pytest.mark.parametrize("way", ["shift", "exact", "hybrid", "focus"])
def test_a_plan_over_several_steps_answers_as_it_does_at_once(windowed: Engine, way: str) -> None:
    check_spread(windowed, way)


def test_the_exact_tier_answers_as_vllm_does(windowed: Engine) -> None:
    check_exact_tier(windowed)
