# SPDX-License-Identifier: Apache-2.0
"""Drive the engine of a test step by step, and check its block pool after each."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.engine import Answer, Engine, _answer


def submit(running: Engine, name: str, prompt: list[int], options: Any, **sampling: Any) -> str:
    """Queue a request; nothing runs before `step` is called."""
    from vllm import SamplingParams

    params = SamplingParams(
        extra_args=options, **{"max_tokens": 4, "temperature": 0.0, "logprobs": 8} | sampling
    )
    return running.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def step(running: Engine) -> dict[str, Answer]:
    """One step; what has finished."""
    answers = finished_in_step(running)
    check_pool(running)
    return answers


def finished_in_step(running: Engine) -> dict[str, Answer]:
    """One step, without a look at the pool; what has finished."""
    outputs = running.llm.llm_engine.step()
    return {output.request_id: _answer(output) for output in outputs if output.finished}


def drain(running: Engine, between: Callable[[], None] = lambda: None) -> dict[str, Answer]:
    """Steps until nothing is left; every request must end in a bounded number of them."""
    answers: dict[str, Answer] = {}
    for _ in range(3000):
        if not running.llm.llm_engine.has_unfinished_requests():
            settle(running)
            return answers
        answers |= step(running)
        between()
    raise AssertionError("requests starve")


def settle(running: Engine) -> None:
    """Until copies to the host are done: on a GPU they end behind the step that ordered them."""
    while running.scheduler.has_requests():
        running.llm.llm_engine.step()


def check_pool(running: Engine) -> None:
    """Between steps only requests that run, or are set aside, hold blocks, and the index knows
    named blocks only."""
    pool, scheduler = running.pool, running.scheduler
    held = Counter(
        block
        for request in [*scheduler.running, *scheduler.kv_holding_waiting]
        for blocks in scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for block in blocks
        if block  # vLLM's null block stands for what a window has passed
    )
    counts = {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null}
    assert counts == held
    assert pool.get_num_free_blocks() + len(held) == pool.num_gpu_blocks - 1
    assert all(b.block_hash is not None for b in pool.blocks if b.block_id in running.index)
    running.check_index()


def abort(running: Engine, request_id: str) -> None:
    running.llm.llm_engine.abort_request([request_id], internal=True)


def preempt(running: Engine, request: Any) -> None:
    """Preempt a running request, as vLLM does where blocks run out."""
    running.scheduler.running.remove(request)
    running.scheduler._preempt_request(request, time.monotonic())


def after_preemption(
    running: Engine, name: str, prompt: list[int], options: Any, steps: int
) -> Answer:
    """What the only request answers that is preempted after some steps."""
    submit(running, name, prompt, options)
    for _ in range(steps):
        step(running)
    [request] = running.scheduler.running
    preempt(running, request)
    [found] = drain(running).values()
    return found


def noted_preemptions(running: Engine, patch: pytest.MonkeyPatch) -> set[str]:
    """Ids of the requests that are preempted from here on, as vLLM tells its workers."""
    seen: set[str] = set()
    schedule = running.scheduler.schedule

    def noted(*given: Any, **named: Any) -> Any:
        output = schedule(*given, **named)
        seen.update(output.preempted_req_ids or ())
        return output

    patch.setattr(running.scheduler, "schedule", noted)
    return seen


def hashes(running: Engine, tokens: list[int]) -> list[Any]:
    """vLLM's names of a prompt's whole blocks."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = running.llm.llm_engine.engine_core.engine_core
    one = Request("", tokens, SamplingParams(), None, block_hasher=core.request_block_hasher)
    return list(one.block_hashes)


def resident(running: Engine, tokens: list[int]) -> list[int]:
    """Blocks that vLLM's prefix cache has of a prompt, as far as it has all."""
    found = []
    for block_hash in hashes(running, tokens):
        cached = running.pool.get_cached_block(block_hash, [0])
        if cached is None:
            break
        found.append(cached[0].block_id)
    return found
