# SPDX-License-Identifier: Apache-2.0
"""Segments that vLLM has evicted are reused from host memory, bit for bit as from the GPU; whatever
ends or fails meanwhile, no row stays held."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, drain, noted_preemptions, settle, step, submit
from tests.e2e.test_equality import EVERYTHING, assert_same

ARGUMENTS: dict[str, Any] = {
    "kv_cache_memory_bytes": 4 << 20,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "dtype": "float32",
}
NOISE = 2e-3  # of float32
SHIFT = NAMESPACE | {"segreuse_policy": "shift"}
FOCUS = NAMESPACE | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.2}
IDLE = {"holds": 0, "steps": 0, "jobs": 0}


def regions() -> list[Path]:
    return list(Path("/dev/shm").glob("vllm_offload_segreuse_*"))


def num_mapped() -> int:
    """How often this process maps a region."""
    return Path("/proc/self/maps").read_text().count("vllm_offload_segreuse_")


@pytest.fixture(scope="module")
def tiered() -> Iterator[Engine]:
    """Host memory for some 60 blocks, which is about twice what the cache has."""
    before = regions()
    options = {"tier": {"host_gib": 0.008, "min_run_tokens": 32, "zeroise": True}}
    with engine("llama", segreuse=options, **ARGUMENTS) as started:
        assert regions() == before, "its name is gone as soon as everybody has opened it"
        assert num_mapped() == 2, "by the scheduler's side and the worker's"
        yield started
    assert num_mapped() == 0, "given back"


@pytest.fixture
def running(tiered: Engine) -> Iterator[Engine]:
    tiered.reset()
    yield tiered
    drain(tiered)
    tiered.check_idle()
    assert counts(tiered) | IDLE == counts(tiered), "rows are still held"


@pytest.fixture
def text(tiered: Engine, request: pytest.FixtureRequest) -> Prompts:
    return Prompts(tiered.vocab_size, seed=sum(map(ord, request.node.name)))


def counts(running: Engine) -> dict[str, int]:
    tier: dict[str, int] = running.scheduler.connector.scheduler_side.status()["tier"]
    return tier


def worker_side(running: Engine) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side


def worker_tier(running: Engine) -> Any:
    """The workers' half of its second tier."""
    (tier,) = [it for it in worker_side(running).features if it.name == "tier"]
    return tier


def evict(running: Engine, text: Prompts) -> None:
    """Fill the cache with other text, which nobody may reuse."""
    tokens = running.pool.num_gpu_blocks * 32
    while tokens > 0:
        running.ask(text.tokens(800), max_tokens=1)
        tokens -= 800
    settle(running)


def ask(running: Engine, prompt: list[int], options: dict[str, Any]) -> Answer:
    [answer] = running.ask(prompt, options=options)
    return answer


@pytest.mark.parametrize("options", [SHIFT, FOCUS], ids=["shift", "focus"])
def test_what_was_evicted_is_reused_from_the_host_bit_for_bit(
    options: dict[str, Any], running: Engine, text: Prompts
) -> None:
    document = text.tokens(230)
    donor, question = text.around(document), text.around(document, gaps=(11, 7))
    ask(running, donor, SHIFT)
    from_gpu = ask(running, question, options)
    assert from_gpu.report["tiered_tokens"] == 0
    running.reset()
    ask(running, donor, SHIFT)
    evict(running, text)
    from_host = ask(running, question, options)
    report = from_host.report
    assert report["tiered_tokens"] == report["reused_tokens"] == from_gpu.report["reused_tokens"]
    assert report["recomputed_tokens"] == from_gpu.report["recomputed_tokens"]
    assert report["tiered_tokens"] > 150
    assert from_host.token_ids == from_gpu.token_ids
    assert from_host.logprobs == from_gpu.logprobs


def test_one_plan_reads_the_host_and_the_cache(running: Engine, text: Prompts) -> None:
    first, second = text.tokens(160), text.tokens(160)
    donors = [text.around(document) for document in (first, second)]
    question = text.around(second, first)
    for donor in donors:
        ask(running, donor, SHIFT)
    from_gpu = ask(running, question, SHIFT)
    running.reset()
    ask(running, donors[0], SHIFT)
    evict(running, text)
    ask(running, donors[1], SHIFT)
    both = ask(running, question, SHIFT)
    assert 0 < both.report["tiered_tokens"] < both.report["reused_tokens"]
    assert both.report["reused_tokens"] == from_gpu.report["reused_tokens"]
    assert both.logprobs == from_gpu.logprobs


def test_recomputing_all_that_comes_from_the_host_equals_full_prefill(
    running: Engine, text: Prompts
) -> None:
    document = text.tokens(200)
    question = text.around(document)
    reference = ask(running, question, {})
    running.reset()
    ask(running, text.around(document), SHIFT)
    evict(running, text)
    answer = ask(running, question, EVERYTHING)
    assert answer.report["tiered_tokens"] > 150
    assert answer.report["recomputed_tokens"] == answer.report["reused_tokens"]
    assert_same(answer, reference, NOISE)


def test_a_reset_forgets_the_host(running: Engine, text: Prompts) -> None:
    document = text.tokens(200)
    ask(running, text.around(document), SHIFT)
    evict(running, text)
    assert counts(running)["host"] > 0
    cells = worker_tier(running).region.cells()
    assert cells.any()
    running.reset()
    assert counts(running)["host"] == 0
    assert not cells.any(), "with zeroise, not one byte"
    del cells
    assert ask(running, text.around(document), SHIFT).report["reused_tokens"] == 0


def test_rows_that_cannot_be_read_cost_a_request_its_reuse_only(
    running: Engine, text: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = text.tokens(200)
    question = text.around(document)
    reference = ask(running, question, {})
    running.reset()
    ask(running, text.around(document), SHIFT)
    evict(running, text)

    def fail(rows: Any) -> Any:
        raise OSError("cannot read")

    with monkeypatch.context() as patch:
        patch.setattr(worker_side(running).backlog.prefill.aligner.host_rows, "load", fail)
        answer = ask(running, question, SHIFT)
    assert answer.report["tiered_tokens"] > 0, "as planned"
    assert_same(answer, reference, NOISE)


def test_blocks_that_cannot_be_stored_are_never_read(
    running: Engine, text: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = text.tokens(200)

    def fail(blocks: Any, rows: Any) -> None:
        raise OSError("cannot write")

    with monkeypatch.context() as patch:
        patch.setattr(worker_tier(running).worker.mover, "store", fail)
        ask(running, text.around(document), SHIFT)
        evict(running, text)
    assert counts(running)["host"] == 0
    assert ask(running, text.around(document), SHIFT).report["reused_tokens"] == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_who_is_aborted_holds_no_row(steps: int, running: Engine, text: Prompts) -> None:
    document = text.tokens(200)
    ask(running, text.around(document), SHIFT)
    evict(running, text)
    ids = {
        name: submit(running, name, text.around(document), SHIFT) for name in ("aborted", "other")
    }
    for _ in range(steps):
        step(running)
    abort(running, ids["aborted"])
    answers = drain(running)
    [other] = [answer for name, answer in answers.items() if name.startswith("other")]
    assert other.report["tiered_tokens"] > 0


def test_under_pressure_requests_are_preempted_and_rows_replaced(
    running: Engine, text: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = noted_preemptions(running, monkeypatch)
    soak(running, text, requests=24, max_tokens=80)
    assert preempted


@pytest.mark.slow("400 requests", instead="e2e/test_tier")
def test_a_soak_leaks_nothing(running: Engine, text: Prompts) -> None:
    soak(running, text, requests=400, max_tokens=12)


def soak(running: Engine, text: Prompts, requests: int, max_tokens: int) -> None:
    """Questions on more documents than cache and host memory hold, some of them aborted."""
    chance = random.Random(requests)
    documents = [text.tokens(chance.randrange(100, 260)) for _ in range(20)]
    rows = worker_tier(running).region.shape.rows
    reports: list[dict[str, Any]] = []
    left = requests
    while left:
        ids = []
        for _ in range(min(left, 4)):
            chosen = chance.sample(documents, chance.randrange(1, 3))
            options = chance.choice([SHIFT, FOCUS])
            name = f"soak {left}"
            ids.append(submit(running, name, text.around(*chosen), options, max_tokens=max_tokens))
            left -= 1
        for _ in range(chance.randrange(4)):
            reports += [answer.report for answer in step(running).values()]
        if chance.random() < 0.3:
            abort(running, ids[-1])
        reports += [answer.report for answer in drain(running).values()]
        assert counts(running)["host"] <= rows
        assert counts(running) | IDLE == counts(running), "rows are still held"
    assert sum(report["tiered_tokens"] for report in reports) > 0
    assert counts(running)["host"] > 0.5 * rows, "rows were replaced"
