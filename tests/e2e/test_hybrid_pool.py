# SPDX-License-Identifier: Apache-2.0
"""Small block pools with vLLM's hybrid KV cache manager: preemption, eviction, exhaustion."""

from collections.abc import Iterator

import pytest

from bench.integrity import check_integrity
from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import drain, noted_preemptions, submit
from tests.e2e.test_equality import assert_same
from tests.e2e.test_hybrid_windows import HYBRID, NOISE, check

pytestmark = pytest.mark.patches("single_type_kv_cache_manager")

NUM_BLOCKS = 49  # one of them is vLLM's null block
LIMITS = {"max_model_len": 640, "max_num_batched_tokens": 640, "max_num_seqs": 16}
EVERYTHING = NAMESPACE | {"segreuse_recompute_ratio": 1.0, "segreuse_min_reused_tokens": 16}
SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}
LONG = {"max_tokens": 90, "ignore_eos": True}


def small(segreuse: bool) -> object:
    sizes = {"num_gpu_blocks_override": NUM_BLOCKS, "dtype": "float32"}
    return engine("gemma3", segreuse, **sizes, **LIMITS, **HYBRID)


def texts(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    text = Prompts(vocab_size, seed=22)
    documents = [text.tokens(160), text.tokens(128)]
    return documents, [text.around(*documents, gaps=(9 + i, 4, 6)) for i in range(5)]


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    with small(segreuse=False) as running:
        return [running.ask(prompt, **LONG)[0] for prompt in texts(running.vocab_size)[1]]


@pytest.fixture(scope="module")
def running(plain: list[Answer]) -> Iterator[Engine]:
    with small(segreuse=True) as started:
        yield started


@pytest.fixture(autouse=True)
def _clean(running: Engine) -> Iterator[None]:
    running.reset()
    yield
    check(running)
    assert not running.scheduler.connector.scheduler_side.parts.core.requests


def test_preempted_requests_are_planned_anew_and_right(
    running: Engine, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = noted_preemptions(running, monkeypatch)
    documents, prompts = texts(running.vocab_size)
    running.ask(*documents, options=NAMESPACE, max_tokens=1)
    for i, prompt in enumerate(prompts):
        submit(running, str(i), prompt, EVERYTHING, **LONG)
    answers = drain(running)
    assert preempted
    for i, expected in enumerate(plain):
        assert_same(answers[str(i)], expected, NOISE)
    assert max(answer.report["reused_tokens"] for answer in answers.values()) > 0


def test_a_pool_that_is_used_up_again_and_again_stays_whole(running: Engine) -> None:
    """Eighty prompts of known and new text, several at a time: donors come and go."""
    text = Prompts(running.vocab_size, seed=5)
    documents = [text.tokens(96 + 32 * i) for i in range(6)]
    reused = 0
    for turn in range(20):
        for i in range(4):
            one, other = documents[(turn + i) % 6], documents[(turn * 5 + 3 * i) % 6]
            prompt = text.around(one, other[: 40 + 8 * i])
            submit(running, f"{turn}.{i}", prompt, SHIFT if i % 2 else EVERYTHING, max_tokens=9)
        reused += sum(it.report["reused_tokens"] for it in drain(running).values())
        check_integrity(running.pool.siblings)
    assert reused > 1000


def test_what_does_not_fit_runs_without_reuse(running: Engine) -> None:
    """A plan needs blocks for all that it supplies in every group, for the time of a step."""
    text = Prompts(running.vocab_size, seed=6)
    document = text.tokens(400)
    running.ask(document, options=NAMESPACE, max_tokens=1)
    prompt = text.tokens(9) + document + text.tokens(180)
    [found] = running.ask(prompt, options=SHIFT)
    assert found.report["bypass_reason"] == "no_free_blocks" or found.report["reused_tokens"] > 0
    assert len(found.token_ids) == 4
