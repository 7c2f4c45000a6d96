# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): equality, every policy, the exact tier, and drift."""

from collections.abc import Iterator

import pytest

from bench.shapes import LATENT
from tests.e2e.engine import BF16_NOISE, Engine, engine
from tests.e2e.test_equality import check_everything
from tests.e2e.test_policies import check_drift, check_reported_work
from tests.e2e.test_spread import check_exact_tier, check_spread
from tests.latent import BLOCK_SIZE, prefix_cache_for_latents

MORE_LATENT = pytest.mark.slow("another shape or number format", instead="e2e/test_latent")


@pytest.mark.shows("recompute", "partial")
@pytest.mark.parametrize(
    "shape", [pytest.param(it, marks=[] if it == "deepseek_v3" else [MORE_LATENT]) for it in LATENT]
)
def test_recomputing_everything_equals_plain_vllm(shape: str) -> None:
    with prefix_cache_for_latents():
        check_everything(shape, noise=2e-3, dtype="float32", block_size=BLOCK_SIZE)


@MORE_LATENT
@pytest.mark.parametrize("shape", LATENT)
def test_in_bf16(shape: str) -> None:
    with prefix_cache_for_latents():
        check_everything(shape, noise=BF16_NOISE, dtype="bfloat16", block_size=BLOCK_SIZE)


@MORE_LATENT
@pytest.mark.needs("amx")
@pytest.mark.parametrize("shape", LATENT)
def test_by_vllms_backend_for_amx(shape: str) -> None:
    """With vLLM's own prefix cache, in the one type that its backend takes."""
    check_everything(shape, noise=BF16_NOISE, dtype="bfloat16")


@pytest.fixture(scope="module")
def latent() -> Iterator[Engine]:
    options = {
        "spread_tokens": 16,
        "max_provenance_depth": 0,
    }
    arguments = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": 1024}
    with (
        prefix_cache_for_latents(),
        engine("deepseek_v3", segreuse=options, **arguments) as started,
    ):
        yield started
        started.check_idle()


@pytest.fixture(autouse=True)
def forgotten(request: pytest.FixtureRequest) -> None:
    if "latent" in request.fixturenames:
        request.getfixturevalue("latent").reset()


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("policy", ["sparsex", "cacheblend", "prophet", "focus", "peaks"])
def test_the_reported_work_is_the_work_done(latent: Engine, policy: str, dense_layers: int) -> None:
    check_reported_work(latent, policy, dense_layers)


@pytest.mark.parametrize("policy", ["prophet", "focus"])
def test_above_its_drift_a_request_is_computed_in_full(latent: Engine, policy: str) -> None:
    check_drift(latent, policy)


@pytest.mark.parametrize("way", ["shift", "exact", "hybrid", "focus"])
def test_a_plan_over_several_steps_answers_as_it_does_at_once(latent: Engine, way: str) -> None:
    check_spread(latent, way)


def test_the_exact_tier_answers_as_vllm_does(latent: Engine) -> None:
    check_exact_tier(latent)
