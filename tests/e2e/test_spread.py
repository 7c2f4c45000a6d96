# SPDX-License-Identifier: Apache-2.0
"""Plans over several steps: the same answers, and nobody waits for a whole plan."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, drain, finished_in_step, preempt, resident, step, submit
from tests.e2e.test_equality import assert_same
from vllm_segreuse.compat.lora_manager import Adapters

STEP_TOKENS = 48
BASE = NAMESPACE | {"segreuse_min_reused_tokens": 16, "segreuse_dense_layers": 0}
WAYS = {
    "shift": BASE | {"segreuse_policy": "shift"},
    "exact": BASE | {"segreuse_policy": "exact"},
    "sparse": BASE | {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.3},
    "hybrid": BASE
    | {
        "segreuse_policy": "sparsex",
        "segreuse_recompute_ratio": 0.2,
        "segreuse_dense_layers": 1,
    },
    "cacheblend": BASE
    | {
        "segreuse_policy": "cacheblend",
        "segreuse_recompute_ratio": 0.2,
        "segreuse_dense_layers": 1,
    },
    "focus": BASE | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.2},
    "everything": BASE | {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 1.0},
}
EVERYTHING = WAYS["everything"]
NOISE = 2e-3  # of float32


@pytest.fixture(scope="module")
def spreading() -> Iterator[Engine]:
    with engine(
        "qwen3",
        segreuse={"spread_tokens": STEP_TOKENS},
        dtype="float32",
        max_model_len=1024,
        async_scheduling=False,  # steps are counted
    ) as running:
        yield running


def two_prompts(running: Engine) -> list[list[int]]:
    """With documents of `cached`; the last token of the first begins a block."""
    text = Prompts(running.vocab_size, seed=8)
    documents = [text.tokens(300), text.tokens(170)]
    first, second = text.around(*documents), text.around(documents[1])
    return [first + text.tokens((1 - len(first)) % 32), second]


@pytest.fixture
def prompts(spreading: Engine) -> Iterator[list[list[int]]]:
    yield two_prompts(spreading)
    if name := name_of(spreading, "decodes"):
        abort(spreading, name)
    drain(spreading)
    spreading.check_idle()


def cached(running: Engine, prompts: list[list[int]], options: dict[str, object]) -> None:
    """Nothing but the documents; for the exact tier the first prompt, with a hole in it."""
    running.reset()
    if options["segreuse_policy"] == "exact":
        running.ask(prompts[0], max_tokens=1)
        running.pool.evict_blocks({*resident(running, prompts[0])[2:5]})
    else:
        documents = [prompts[0][37:337], prompts[1][37:207]]
        running.ask(*documents, options=NAMESPACE, max_tokens=1)


def someone_decodes(running: Engine) -> None:
    """A request that others would make wait."""
    text = Prompts(running.vocab_size, seed=9)
    submit(running, "decodes", text.tokens(20), None, max_tokens=400, ignore_eos=True)
    for _ in range(2):
        step(running)


def decoded(running: Engine) -> int:
    return len(running.scheduler.requests[name_of(running, "decodes")].output_token_ids)


def name_of(running: Engine, name: str) -> str:
    """vLLM appends to the names of requests; "" if there is none."""
    return next((i for i in running.scheduler.requests if i.startswith(name)), "")


def set_aside(running: Engine) -> list[str]:
    requests = running.scheduler.requests.values()
    return [r.request_id for r in requests if r.status.name == "WAITING_FOR_REMOTE_KVS"]


def until(running: Engine, *names: str) -> tuple[dict[str, Answer], int]:
    """Steps until these have answered; the most steps in a row that somebody was set aside."""
    answers: dict[str, Answer] = {}
    longest = now = 0
    for _ in range(500):
        answers |= step(running)
        now = now + 1 if set_aside(running) else 0
        longest = max(longest, now)
        if answers.keys() >= set(names):
            return answers, longest
    raise AssertionError(f"{set(names) - answers.keys()} did not end")


def at_once(
    running: Engine, prompts: list[list[int]], index: int, options: dict[str, object]
) -> Answer:
    """The answer of a plan that is not spread: nobody else is there."""
    cached(running, prompts, options)
    submit(running, "alone", prompts[index], options)
    assert not set_aside(running)
    answer = drain(running)["alone"]
    assert answer.report["bypass_reason"] is None
    cached(running, prompts, options)
    return answer


def measured(report: dict[str, Any]) -> dict[str, Any]:
    """A report whose drift may differ by rounding: chunks are other batches."""
    drift = report["drift"]
    return report | {"drift": drift and pytest.approx(drift, rel=0.02)}


def check_spread(running: Engine, way: str) -> None:
    """A plan over several steps answers as it does at once."""
    prompt, *_ = prompts = two_prompts(running)
    alone = at_once(running, prompts, 0, WAYS[way])
    assert alone.report["reused_tokens"] > 200
    someone_decodes(running)
    submit(running, "spread", prompt, WAYS[way])
    answers, steps = until(running, "spread")
    assert steps >= 2
    assert measured(answers["spread"].report) == measured(alone.report)
    assert_same(answers["spread"], alone, noise=NOISE)
    abort(running, name_of(running, "decodes"))
    drain(running)


def check_exact_tier(running: Engine) -> None:
    """It answers as vLLM does. Of a cold engine."""
    prompt, *_ = prompts = two_prompts(running)
    [expected] = running.ask(prompt)
    cached(running, prompts, WAYS["exact"])
    [found] = running.ask(prompt, options=WAYS["exact"])
    assert found.report["exact_tokens"] > 200
    assert_same(found, expected, noise=NOISE)


@pytest.mark.parametrize("way", WAYS)
def test_it_answers_as_it_does_at_once(
    spreading: Engine, prompts: list[list[int]], way: str
) -> None:
    alone = at_once(spreading, prompts, 0, WAYS[way])
    someone_decodes(spreading)
    submit(spreading, "spread", prompts[0], WAYS[way])
    answers, steps = until(spreading, "spread")
    assert steps >= 2
    assert measured(answers["spread"].report) == measured(alone.report)
    assert_same(answers["spread"], alone, noise=NOISE)


def test_others_get_a_token_in_every_step(spreading: Engine, prompts: list[list[int]]) -> None:
    cached(spreading, prompts, EVERYTHING)
    someone_decodes(spreading)
    submit(spreading, "spread", prompts[0], EVERYTHING)
    step(spreading)
    steps = 1
    while set_aside(spreading):
        before = decoded(spreading)
        step(spreading)
        assert decoded(spreading) == before + 1
        steps += 1
    # All tokens at all layers, and the new ones once more at the first, to choose.
    assert 0 <= steps - len(prompts[0]) // STEP_TOKENS <= 4


def test_plans_are_done_in_the_order_they_came(spreading: Engine, prompts: list[list[int]]) -> None:
    options = EVERYTHING | {"segreuse_dense_layers": 1}
    expected = [at_once(spreading, prompts, index, options) for index in (0, 1)]
    someone_decodes(spreading)
    for name, prompt in zip(("first", "second"), prompts, strict=True):
        submit(spreading, name, prompt, options)
    step(spreading)
    order = set_aside(spreading)
    assert [name[:5] for name in order] == ["first", "secon"]
    gone: list[str] = []
    answers: dict[str, Answer] = {}
    while len(answers) < 2:
        answers |= step(spreading)
        left = set_aside(spreading)
        gone += [name for name in order if name not in left and name not in gone]
    assert gone == order
    for name, alone in zip(("first", "second"), expected, strict=True):
        assert_same(answers[name], alone, noise=NOISE)


@pytest.mark.parametrize("steps", [1, 3])
def test_22_an_abort_in_the_middle_gives_everything_back(
    spreading: Engine, prompts: list[list[int]], steps: int
) -> None:
    expected = at_once(spreading, prompts, 1, EVERYTHING)
    someone_decodes(spreading)
    submit(spreading, "aborted", prompts[0], EVERYTHING)
    submit(spreading, "next", prompts[1], EVERYTHING)
    for _ in range(steps):
        step(spreading)
    abort(spreading, name_of(spreading, "aborted"))
    answers, _ = until(spreading, "next")
    assert set(answers) == {"next"}
    assert_same(answers["next"], expected, noise=NOISE)


def test_26_a_reset_in_the_middle_calls_it_back(
    spreading: Engine, prompts: list[list[int]]
) -> None:
    [plain] = spreading.ask(prompts[0])
    cached(spreading, prompts, EVERYTHING)
    someone_decodes(spreading)
    submit(spreading, "called back", prompts[0], EVERYTHING)
    submit(spreading, "aborted", prompts[1], EVERYTHING)
    for _ in range(2):
        step(spreading)
    assert len(set_aside(spreading)) == 2
    abort(spreading, name_of(spreading, "aborted"))
    assert spreading.llm.reset_prefix_cache(reset_running_requests=True)
    answers, _ = until(spreading, "called back")
    assert answers["called back"].report["bypass_reason"] == "reset"
    assert_same(answers["called back"], plain, noise=NOISE)


def test_27_an_error_between_two_steps_costs_the_reuse(
    spreading: Engine,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    [plain] = spreading.ask(prompts[0])
    cached(spreading, prompts, EVERYTHING)
    someone_decodes(spreading)
    submit(spreading, "spread", prompts[0], WAYS["shift"])
    step(spreading)
    assert set_aside(spreading)
    original: Callable[..., object] = Adapters.applied  # to eager and compiled chunks

    def fails_once(*args: object) -> object:
        monkeypatch.setattr(Adapters, "applied", original)
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(Adapters, "applied", fails_once)
    answers, _ = until(spreading, "spread")
    assert "on purpose" in caplog.text
    assert_same(answers["spread"], plain, noise=NOISE)


def test_19_a_preempted_request_is_spread_again(
    spreading: Engine, prompts: list[list[int]]
) -> None:
    expected = at_once(spreading, prompts, 0, EVERYTHING)
    someone_decodes(spreading)
    submit(spreading, "spread", prompts[0], EVERYTHING)
    finished_in_step(spreading)
    request = spreading.scheduler.requests[name_of(spreading, "spread")]
    while request.status.name != "RUNNING":
        finished_in_step(spreading)
    preempt(spreading, request)
    answers, steps = until(spreading, "spread")
    assert steps >= 2
    assert_same(answers["spread"], expected, noise=NOISE)
