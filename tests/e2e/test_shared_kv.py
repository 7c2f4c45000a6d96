# SPDX-License-Identifier: Apache-2.0
"""A model whose later layers share the KV of earlier ones, and whose layers have an input of their
own for each token (Gemma 4 E2B and E4B): a pass runs the earlier ones."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import NAMESPACE, Engine, engine
from tests.e2e.test_equality import assert_same, check_partial, prompts_for
from tests.e2e.test_policies import check_drift, check_reported_work, options
from tests.e2e.test_spread import check_exact_tier, check_spread

pytestmark = pytest.mark.patches("worker_utils")

RECOMPUTING = ("sparsex", "epic", "cacheblend", "prophet", "peaks", "focus")
NOISE = 2e-3  # of float32


@pytest.fixture(scope="module")
def sharing() -> Iterator[Engine]:
    """Prompts are prefilled in chunks, and plans take several steps if others run."""
    chunked = {"max_model_len": 1024, "max_num_batched_tokens": 256}
    reuse = {"spread_tokens": 24, "max_provenance_depth": 0}
    with engine("gemma4_e", segreuse=reuse, dtype="float32", **chunked) as started:
        yield started
        started.check_idle()


@pytest.fixture(autouse=True)
def forgotten(sharing: Engine) -> None:
    sharing.reset()


@pytest.mark.shows("recompute", "window", family="gemma4_e")
@pytest.mark.parametrize("policy", RECOMPUTING)
def test_recomputing_everything_equals_plain_vllm(sharing: Engine, policy: str) -> None:
    documents, prompts = prompts_for(sharing.vocab_size)
    reference = sharing.ask(*prompts)
    sharing.reset()
    sharing.ask(*documents, options=NAMESPACE, max_tokens=1)
    for batch in (prompts[:1], prompts):
        chosen = options(policy, segreuse_recompute_ratio=1.0)
        for ours, theirs in zip(sharing.ask(*batch, options=chosen), reference, strict=False):
            assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] > 200
            assert_same(ours, theirs, NOISE)


@pytest.mark.shows("partial", family="gemma4_e")
def test_a_part_is_recomputed(sharing: Engine) -> None:
    check_partial(sharing, *prompts_for(sharing.vocab_size))


@pytest.mark.parametrize("dense_layers", [0, 2])
@pytest.mark.parametrize("policy", ["shift", *RECOMPUTING])
def test_the_reported_work_is_the_work_done(
    sharing: Engine, policy: str, dense_layers: int
) -> None:
    check_reported_work(sharing, policy, dense_layers)


def test_above_its_drift_a_request_is_computed_in_full(sharing: Engine) -> None:
    check_drift(sharing, "focus")


@pytest.mark.parametrize("way", ["shift", "exact", "hybrid", "cacheblend", "focus"])
def test_a_plan_over_several_steps_answers_as_it_does_at_once(sharing: Engine, way: str) -> None:
    check_spread(sharing, way)


def test_the_exact_tier_answers_as_vllm_does(sharing: Engine) -> None:
    check_exact_tier(sharing)


@pytest.mark.parametrize("policy", ["shift", "focus"])
def test_plain_requests_find_nothing_approximate(sharing: Engine, policy: str) -> None:
    documents, prompts = prompts_for(sharing.vocab_size)
    reference = sharing.ask(*prompts)
    sharing.reset()
    sharing.ask(*documents, options=NAMESPACE, max_tokens=1)
    for ours in sharing.ask(*prompts, options=options(policy)):
        assert ours.report["reused_tokens"] > 200
    for plain, theirs in zip(sharing.ask(*prompts), reference, strict=True):
        assert plain.token_ids == theirs.token_ids
        assert_same(plain, theirs, noise=1e-4)
