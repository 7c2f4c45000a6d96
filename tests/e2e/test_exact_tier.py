# SPDX-License-Identifier: Apache-2.0
"""The exact tier adds nothing to what vLLM's own answers depend on the cache: to the last bit where
they do not (`exact_arms`; 1,000 prompts per engine are its long run)."""

import pytest

from tests.e2e.exact_arms import (
    CONTROL,
    CORES,
    EXACT,
    OWN,
    Found,
    ask_engine,
    ask_in_process_of_its_own,
)

PROMPTS = {"TP=1": 32, "TP=2 chunked": 16, "TP=1 bf16": 16, "TP=1 compiled": 16}
CONTROLS = 8
OTHER_ENGINES = pytest.mark.slow("other ways to run the engine", instead="e2e/test_exact_tier")


@pytest.fixture(
    scope="module",
    params=[
        "TP=1" if name == "TP=1" else pytest.param(name, marks=OTHER_ENGINES) for name in PROMPTS
    ],
)
def found(request: pytest.FixtureRequest) -> Found:
    name = request.param
    if "TP=2" in name:
        if len(CORES) < 2:
            pytest.skip(f"tensor parallelism needs 2 CPUs, one per rank; there is {len(CORES)}")
        return ask_in_process_of_its_own(name, PROMPTS[name], CONTROLS, seed=51)
    return ask_engine(name, PROMPTS[name], CONTROLS, seed=51)


@pytest.mark.parametrize("arm", EXACT)
def test_the_exact_tier_is_as_close_to_a_cold_answer_as_vllm_itself(found: Found, arm: str) -> None:
    found.check(arm)


def test_holes_are_filled_and_the_rest_is_reused(found: Found) -> None:
    prompts = len(found.differences["hole"])
    assert prompts >= 16
    for arm in ("hole", "preempted", "tiered"):
        assert found.planned[arm] == prompts
        assert found.exact_tokens[arm] >= 32 * prompts
    for arm in ("cold", "warm", *OWN):
        assert found.planned[arm] == 0


def test_the_comparison_can_fail(found: Found) -> None:
    """Equal tokens behind another prefix are not enough."""
    assert found.planned[CONTROL] == len(found.differences[CONTROL]) >= CONTROLS
    with pytest.raises(AssertionError, match="off by"):
        found.check(CONTROL)
