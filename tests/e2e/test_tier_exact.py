# SPDX-License-Identifier: Apache-2.0
"""A request's own prefix that vLLM has evicted is restored from the second tier: the same bytes in
the KV cache, the same log-probabilities, and exact names only once it is in place."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, drain, resident, step, submit
from tests.e2e.test_equality import assert_same
from tests.e2e.test_tier import (
    ARGUMENTS,
    FOCUS,
    IDLE,
    NOISE,
    SHIFT,
    ask,
    counts,
    evict,
    worker_side,
)

EXACT = NAMESPACE | {"segreuse_policy": "exact"}
LENGTH = 7 * BLOCK_SIZE + 9
POLICIES = pytest.mark.parametrize(
    "options", [SHIFT, FOCUS, EXACT], ids=["shift", "focus", "exact"]
)


@pytest.fixture(scope="module")
def tiered() -> Iterator[Engine]:
    """By vLLM's own flag, which asks for as much host memory as the tests of segments have."""
    options = {"tier": {"min_run_tokens": 32}}
    with engine("llama", segreuse=options, kv_offloading_size=0.008, **ARGUMENTS) as started:
        yield started


@pytest.fixture
def running(tiered: Engine) -> Iterator[Engine]:
    tiered.reset()
    yield tiered
    drain(tiered)
    tiered.check_idle()
    assert counts(tiered) | IDLE == counts(tiered), "rows are still held"
    assert not tiered.pool._awaited, "names are still awaited"


@pytest.fixture
def text(tiered: Engine, request: pytest.FixtureRequest) -> Prompts:
    return Prompts(tiered.vocab_size, seed=sum(map(ord, request.node.name)))


def pages(running: Engine, blocks: list[int]) -> list[torch.Tensor]:
    """Bytes of blocks, of each layer."""
    layers = worker_side(running).backlog.prefill.aligner.layers
    return [layer.pages.view(torch.uint8)[blocks].clone() for layer in layers]


def donate(running: Engine, prompt: list[int]) -> tuple[Answer, list[torch.Tensor]]:
    """Compute a prompt, and then evict it; the answer of a prefix hit meanwhile, and its bytes."""
    ask(running, prompt, SHIFT)
    before = pages(running, resident(running, prompt))
    hit = ask(running, prompt, SHIFT)
    assert hit.cached_tokens == len(prompt) // BLOCK_SIZE * BLOCK_SIZE
    return hit, before


@POLICIES
def test_an_evicted_prefix_is_restored_to_the_last_bit(
    options: dict[str, Any], running: Engine, text: Prompts
) -> None:
    prompt = text.tokens(LENGTH)
    hit, before = donate(running, prompt)
    evict(running, text)
    assert not resident(running, prompt)
    restored = ask(running, prompt, options)
    report = restored.report
    assert report["tiered_tokens"] == report["exact_tokens"] == 7 * BLOCK_SIZE
    assert report["reused_tokens"] == 7 * BLOCK_SIZE
    assert (report["prefix_tokens"], report["recomputed_tokens"]) == (0, 0)
    assert restored.token_ids == hit.token_ids
    assert restored.logprobs == hit.logprobs
    blocks = resident(running, prompt)
    assert len(blocks) == 7, "it has its exact names again"
    for now, then in zip(pages(running, blocks), before, strict=True):
        assert torch.equal(now, then)
    again = ask(running, prompt, None)  # type: ignore[arg-type]
    assert again.cached_tokens == 7 * BLOCK_SIZE, "for requests without keys, too"
    assert again.logprobs == hit.logprobs


def test_who_skips_the_prefix_cache_computes_the_prefix(running: Engine, text: Prompts) -> None:
    prompt = text.tokens(LENGTH)
    donate(running, prompt)
    evict(running, text)
    [answer] = running.ask(prompt, options=SHIFT, skip_reading_prefix_cache=True)
    assert answer.report["bypass_reason"] == "prefix_cache_skipped"
    assert answer.report["reused_tokens"] == answer.report["tiered_tokens"] == 0


def test_what_vllm_computes_behind_it_is_exact_as_well(running: Engine, text: Prompts) -> None:
    prompt, more = text.tokens(LENGTH), text.tokens(3 * BLOCK_SIZE)
    donate(running, prompt)
    evict(running, text)
    longer = ask(running, prompt + more, SHIFT)
    assert longer.report["reused_tokens"] == longer.report["exact_tokens"] == 7 * BLOCK_SIZE
    assert len(resident(running, prompt + more)) == (LENGTH + len(more)) // BLOCK_SIZE
    running.reset()
    assert_same(ask(running, prompt + more, {}), longer, NOISE)


def test_a_plan_restores_first_and_reuses_segments_behind(running: Engine, text: Prompts) -> None:
    prompt, document = text.tokens(LENGTH), text.tokens(200)
    question, donor = prompt + text.around(document), text.around(document, gaps=(50, 3))
    ask(running, donor, SHIFT)
    donate(running, prompt)
    from_hit = ask(running, question, SHIFT)
    assert from_hit.report["prefix_tokens"] == 7 * BLOCK_SIZE
    running.reset()
    ask(running, donor, SHIFT)
    donate(running, prompt)
    evict(running, text)
    both = ask(running, question, SHIFT)
    report = both.report
    assert report["exact_tokens"] == 7 * BLOCK_SIZE
    assert report["reused_tokens"] > 7 * BLOCK_SIZE + 100
    assert report["tiered_tokens"] == report["reused_tokens"]
    assert both.logprobs == from_hit.logprobs, "as behind a prefix hit of vLLM"
    assert len(resident(running, question)) == 7, "and nothing approximate is found as a prefix"


@POLICIES
def test_rows_that_cannot_be_read_leave_no_exact_name(
    options: dict[str, Any], running: Engine, text: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text.tokens(LENGTH)
    reference, _ = donate(running, prompt)
    evict(running, text)

    def fail(rows: Any) -> Any:
        raise OSError("cannot read")

    with monkeypatch.context() as patch:
        patch.setattr(worker_side(running).backlog.prefill.aligner.host_rows, "load", fail)
        answer = ask(running, prompt, options)
    assert answer.report["recomputed_tokens"] == answer.report["reused_tokens"] > 0
    assert_same(answer, reference, NOISE)
    assert not resident(running, prompt)
    assert ask(running, prompt, {}).cached_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_who_is_aborted_leaves_nothing_behind(steps: int, running: Engine, text: Prompts) -> None:
    prompt = text.tokens(LENGTH)
    hit, before = donate(running, prompt)
    evict(running, text)
    aborted = submit(running, "aborted", prompt, SHIFT)
    for _ in range(steps):
        step(running)
    abort(running, aborted)
    drain(running)
    answer = ask(running, prompt, EXACT)
    assert answer.report["prefix_tokens"] + answer.report["exact_tokens"] == 7 * BLOCK_SIZE
    assert answer.logprobs == hit.logprobs
    for now, then in zip(pages(running, resident(running, prompt)), before, strict=True):
        assert torch.equal(now, then)
