# SPDX-License-Identifier: Apache-2.0
"""Every policy on the real engine: it computes what its report says, and right when it computes
everything."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import NAMESPACE, Engine, engine
from tests.e2e.test_equality import assert_same, prompts_for
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.policies import POLICIES

pytestmark = pytest.mark.e2e

EVERYTHING = {"segreuse_recompute_ratio": 1.0}


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    with engine("qwen3", segreuse={"max_provenance_depth": 0}, dtype="float32") as started:
        yield started


@pytest.fixture(autouse=True)
def forgotten(reusing: Engine) -> None:
    reusing.reset()


def options(policy: str, **more: object) -> dict[str, object]:
    return NAMESPACE | {"segreuse_policy": policy} | more


@pytest.mark.parametrize("policy", ["epic", "cacheblend", "prophet", "peaks", "focus"])
def test_recomputing_everything_equals_plain_vllm(reusing: Engine, policy: str) -> None:
    documents, prompts = prompts_for(reusing.vocab_size)
    reference = reusing.ask(*prompts)
    reusing.reset()
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    for batch in (prompts[:1], prompts):
        for ours, theirs in zip(
            reusing.ask(*batch, options=options(policy, **EVERYTHING)), reference, strict=False
        ):
            assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] > 200
            assert_same(ours, theirs, noise=2e-3)
    reusing.check_idle()


@pytest.mark.parametrize("policy", ["sparsex", "prophet", "peaks", "focus"])
def test_vllms_forward_reads_the_question_as_a_second_reading_in_the_pass(
    reusing: Engine, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, prompts = prompts_for(reusing.vocab_size)
    answers = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(ReusePlan, "leaving_suffix", lambda plan: plan)
        reusing.reset()
        reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
        chosen = options(policy, segreuse_recompute_ratio=0.2)
        answers.append(reusing.ask(*prompts, options=chosen))
    for ours, in_the_pass in zip(*answers, strict=True):
        for key in ("recomputed_tokens", "reused_tokens", "new_tokens"):
            assert ours.report[key] == in_the_pass.report[key]
        assert ours.report["recomputed_tokens"] > 0 or policy == "peaks", "nothing stands out"
        assert_same(ours, in_the_pass, noise=2e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_blocks_held_before_changes_no_answer(reusing: Engine, policy: str) -> None:
    """Nor the choice of tokens: it may be the KV of another namespace."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    layers = get_kv_transfer_group().worker_side.backlog.prefill.aligner.layers
    documents, (prompt, *_) = prompts_for(reusing.vocab_size)
    answers = []
    for held in (0.0, 3.0, -3.0):
        reusing.reset()
        reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
        unnamed = [b.block_id for b in reusing.pool.blocks if b.block_hash is None]
        for layer in layers:
            layer.pages[unnamed] = held
        answers += reusing.ask(prompt, options=options(policy))
    for other in answers[1:]:
        assert other.report == answers[0].report
        assert_same(other, answers[0], noise=1e-5)


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "exact"])  # it moves nothing
def test_the_reported_work_is_the_work_done(
    reusing: Engine, policy: str, dense_layers: int
) -> None:
    check_reported_work(reusing, policy, dense_layers)


def check_reported_work(reusing: Engine, policy: str, dense_layers: int) -> None:
    """Of a cold engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    layers = get_kv_transfer_group().worker_side.backlog.prefill.runner
    documents, (prompt, *_) = prompts_for(reusing.vocab_size)
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    run, computed = layers.run, 0
    schedule, by_vllm = reusing.scheduler.schedule, 0

    def counting(first, last, tokens, *rest):
        nonlocal computed
        computed += (last - first) * len(tokens)
        return run(first, last, tokens, *rest)

    def scheduling(*arguments):
        nonlocal by_vllm
        step = schedule(*arguments)
        by_vllm += step.total_num_scheduled_tokens
        return step

    layers.run, reusing.scheduler.schedule = counting, scheduling
    try:
        [answer] = reusing.ask(
            prompt, options=options(policy, segreuse_dense_layers=dense_layers), max_tokens=1
        )
    finally:
        del layers.run, reusing.scheduler.schedule
    behind = len(prompt) - answer.report["prefix_tokens"]
    in_all = layers.model.in_all
    expected = (computed + by_vllm * in_all) / (behind * in_all)
    assert answer.report["computed_share"] == pytest.approx(expected, abs=1e-4)
    assert answer.report["computed_share"] < 1


@pytest.mark.parametrize("policy", ["prophet", "focus"])
def test_above_its_drift_a_request_is_computed_in_full(reusing: Engine, policy: str) -> None:
    check_drift(reusing, policy)


def check_drift(reusing: Engine, policy: str) -> None:
    """Above it, a request answers as plain vLLM does, and says what both passes took."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    layers = get_kv_transfer_group().worker_side.layers
    documents, prompts = prompts_for(reusing.vocab_size)
    reference = reusing.ask(*prompts)
    reusing.reset()
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    [cheap] = reusing.ask(prompts[0], options=options(policy))
    drift = cheap.report["drift"]
    assert drift > 0
    assert not cheap.report["in_full"]
    [same] = reusing.ask(prompts[0], options=options(policy, segreuse_max_drift=1.5 * drift))
    assert same.report == cheap.report | {"drift": pytest.approx(drift, rel=0.1)}
    [half] = reusing.ask(prompts[0], options=options(policy, segreuse_max_drift=0.5 * drift))
    assert half.report["in_full"]
    assert half.report["drift"] == pytest.approx(drift, rel=0.1)
    strict = options(policy, segreuse_max_drift=0)
    for answer, expected in zip(reusing.ask(*prompts, options=strict), reference, strict=True):
        report = answer.report
        assert report["in_full"]
        assert report["recomputed_tokens"] == report["reused_tokens"] > 200
        assert layers.count / layers.in_all < report["computed_share"] < 2
        assert_same(answer, expected, noise=2e-3)
    reusing.check_idle()
