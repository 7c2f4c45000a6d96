# SPDX-License-Identifier: Apache-2.0
"""Small block pools: preemption, eviction, exhaustion, aborts (failure cases 19 to 23, 29)."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, check_pool, drain, noted_preemptions, step, submit
from tests.e2e.test_equality import assert_same
from tests.parts import parts_of

NUM_BLOCKS = 41  # one of them is vLLM's null block
LIMITS = {"max_model_len": 640, "max_num_batched_tokens": 640, "max_num_seqs": 16}
SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}
EVERYTHING = NAMESPACE | {"segreuse_recompute_ratio": 1.0, "segreuse_min_reused_tokens": 16}
NOISE = 2e-3  # of float32
LONG = {"max_tokens": 90, "ignore_eos": True}


def small_engine(segreuse: bool = True) -> Any:
    return engine("qwen3", segreuse, dtype="float32", num_gpu_blocks_override=NUM_BLOCKS, **LIMITS)


def growing(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Documents, and prompts of them of which several fit beside each other until they grow."""
    text = Prompts(vocab_size, seed=22)
    documents = [text.tokens(160), text.tokens(128)]
    return documents, [text.around(*documents, gaps=(9 + i, 4, 6)) for i in range(5)]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Answer]]:
    """Answers of a fresh engine without the plugin, one request at a time."""
    with small_engine(segreuse=False) as running:
        return {
            "growing": [running.ask(p, **LONG)[0] for p in growing(running.vocab_size)[1]],
        }


@pytest.fixture(scope="module")
def reusing(plain: dict[str, list[Answer]]) -> Iterator[Engine]:
    # After the plain engine has gone: vLLM has one connector per process.
    with small_engine() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(reusing: Engine) -> Iterator[None]:
    reusing.reset()
    yield
    reusing.check_idle()
    assert not reusing.scheduler.connector.scheduler_side.parts.core.requests


@pytest.fixture
def text(reusing: Engine) -> Prompts:
    return Prompts(reusing.vocab_size, seed=23)


@pytest.fixture
def preemptions(reusing: Engine, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ids of preempted requests, as they happen."""
    return noted_preemptions(reusing, monkeypatch)


# Preemption (19).


def test_19_preempted_requests_are_planned_anew_and_right(
    reusing: Engine, plain: dict[str, list[Answer]], preemptions: set[str]
) -> None:
    documents, prompts = growing(reusing.vocab_size)
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    for i, prompt in enumerate(prompts):
        submit(reusing, str(i), prompt, EVERYTHING, **LONG)
    answers = drain(reusing)
    assert preemptions
    for i, reference in enumerate(plain["growing"]):
        assert_same(answers[str(i)], reference, NOISE)
    reused = [answer.report["reused_tokens"] for answer in answers.values()]
    assert max(reused) == 288


def test_19_preempted_requests_complete_with_shifted_kv(
    reusing: Engine, preemptions: set[str]
) -> None:
    documents, prompts = growing(reusing.vocab_size)
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    answers = reusing.ask(*prompts, options=SHIFT, **LONG)
    assert preemptions
    assert [len(answer.token_ids) for answer in answers] == [90] * len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        report = answer.report  # of the first admission, whatever happened later
        assert report["prompt_tokens"] == len(prompt)
        parts = (report[kind + "_tokens"] for kind in ("prefix", "reused", "new"))
        assert sum(parts) == len(prompt)


# Aborts (20).


def test_20_abort_while_waiting(reusing: Engine, text: Prompts) -> None:
    document = text.tokens(160)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    first, second = (
        submit(reusing, name, text.around(document), SHIFT) for name in ("first", "second")
    )
    abort(reusing, first)
    abort(reusing, first)
    assert drain(reusing).keys() == {"second"}
    abort(reusing, second)


def test_20_abort_while_others_have_the_blocks(reusing: Engine, text: Prompts) -> None:
    document = text.tokens(64)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    submit(reusing, "large", text.tokens(600), None, max_tokens=30, ignore_eos=True)
    submit(reusing, "larger", text.tokens(400), None, max_tokens=30, ignore_eos=True)
    while len(reusing.scheduler.running) < 2:
        step(reusing)
    waiting = submit(reusing, "waiting", text.tokens(300) + document + text.tokens(3), SHIFT)
    step(reusing)
    assert len(reusing.scheduler.running) == 2
    tracked = parts_of(reusing.scheduler.connector.scheduler_side).planner.get(waiting)
    assert tracked.decision.reason == "no_free_blocks"
    abort(reusing, waiting)
    assert drain(reusing).keys() == {"large", "larger"}


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_20_abort_while_running(reusing: Engine, text: Prompts, steps: int) -> None:
    """Right behind the step that aligned it, and while it decodes; then it completes late."""
    document = text.tokens(160)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    prompts = {name: text.around(document) for name in ("aborted", "other")}
    ids = {name: submit(reusing, name, p, SHIFT, **LONG) for name, p in prompts.items()}
    for _ in range(steps):
        step(reusing)
    assert len(reusing.scheduler.running) == 2
    abort(reusing, ids["aborted"])
    check_pool(reusing)
    answers = drain(reusing)
    assert answers.keys() == {"other"}
    assert answers["other"].report["reused_tokens"] == 160


# Donors under pressure (21, 23).


def test_21_donors_first_in_line_for_eviction_are_held(reusing: Engine, text: Prompts) -> None:
    """Once the pool is full the document's blocks are the next to be handed out."""
    document = text.tokens(10 * BLOCK_SIZE)
    prompt = text.around(document)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    with_room = reusing.ask(prompt, options=SHIFT)[0]
    assert with_room.report["reused_tokens"] == len(document)

    reusing.reset()
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    blocks = [b.block_id for b in reusing.pool.blocks if b.block_id in reusing.index]
    reusing.ask(text.tokens(19 * BLOCK_SIZE - 8))
    reusing.ask(text.tokens(11 * BLOCK_SIZE - 8))
    queue = [b.block_id for b in reusing.pool.free_block_queue.get_all_free_blocks()]
    assert set(queue[: len(prompt) // BLOCK_SIZE + 1]) & set(blocks)
    full = reusing.ask(prompt, options=SHIFT)[0]
    assert full.report == with_room.report
    assert full.logprobs == with_room.logprobs


def test_23_without_room_beside_all_donors_the_request_reuses_those_that_fit(
    reusing: Engine, text: Prompts
) -> None:
    document = text.tokens(18 * BLOCK_SIZE)
    prompt = text.tokens(5) + document + text.tokens(20)
    reference = reusing.ask(prompt)[0]
    reusing.reset()
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    submit(reusing, "running", text.tokens(5 * BLOCK_SIZE), None, **LONG)
    step(reusing)
    submit(reusing, "crowded", prompt, EVERYTHING)
    answer = drain(reusing)["crowded"]
    assert answer.report["bypass_reason"] is None
    assert 0 < answer.report["reused_tokens"] < len(document)
    assert answer.report["new_tokens"] == len(prompt) - answer.report["reused_tokens"]
    assert_same(answer, reference, NOISE)


def test_23_donors_that_fill_the_pool_make_room(reusing: Engine, text: Prompts) -> None:
    """Every block is a cached donor of what is asked next; nobody waits for ever."""
    documents = [text.tokens(13 * BLOCK_SIZE) for _ in range(3)]
    for document in documents:
        reusing.ask(document, options=NAMESPACE, max_tokens=1)
    assert len(reusing.index) == 39
    prompts = [text.tokens(3) + document + text.tokens(9) for document in documents * 2]
    for i, prompt in enumerate(prompts):
        submit(reusing, str(i), prompt, SHIFT)
    answers = drain(reusing)
    assert len(answers) == len(prompts)
    assert any(answer.report["reused_tokens"] for answer in answers.values())


def test_requests_of_one_step_are_admitted_together(reusing: Engine, text: Prompts) -> None:
    document = text.tokens(2 * BLOCK_SIZE)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    prompts = [text.tokens(11 + i) + document + text.tokens(5) for i in range(10)]
    alone = [reusing.ask(prompt, options=SHIFT)[0] for prompt in prompts]
    reusing.reset()
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    for i, prompt in enumerate(prompts):
        submit(reusing, str(i), prompt, SHIFT)
    step(reusing)
    assert len(reusing.scheduler.running) == len(prompts)
    together = drain(reusing)
    for i, answer in enumerate(alone):
        assert together[str(i)].report["reused_tokens"] == len(document)
        assert_same(together[str(i)], answer, NOISE)
