# SPDX-License-Identifier: Apache-2.0
"""Weights are replaced, and the engine is paused or sleeps, in the middle of things.

vLLM leaves it to the caller to reset the prefix cache. With weights replaced, nothing that was
computed before is reused, whether or not the caller does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, drain, settle, step, submit
from tests.e2e.test_equality import assert_same
from tests.e2e.test_tier import counts, evict

pytestmark = pytest.mark.patches("engine_core")

SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}
SPREAD = SHIFT | {
    "segreuse_policy": "sparsex",
    "segreuse_recompute_ratio": 1.0,
    "segreuse_dense_layers": 0,
}
NOISE = 2e-3  # of float32
STEP_TOKENS = 48


@pytest.fixture(scope="module")
def started() -> Iterator[Engine]:
    options = {"spread_tokens": STEP_TOKENS, "tier": {"host_gib": 0.008, "min_run_tokens": 32}}
    with engine(
        "llama",
        segreuse=options,
        kv_cache_memory_bytes=4 << 20,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        dtype="float32",
        async_scheduling=False,  # steps are counted
    ) as running:
        yield running


@pytest.fixture
def running(started: Engine) -> Iterator[Engine]:
    started.reset()
    yield started
    drain(started)
    started.reset()
    started.check_idle()


@pytest.fixture
def text(started: Engine, request: pytest.FixtureRequest) -> Prompts:
    return Prompts(started.vocab_size, seed=sum(map(ord, request.node.name)))


def checkpoint(running: Engine) -> dict[str, torch.Tensor]:
    """The weights in the model's files."""
    folder = Path(running.llm.llm_engine.model_config.model)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def update(running: Engine, by: float = 0.0) -> None:
    """As a trainer does it: the weights of the files, so much larger."""
    weights = {name: weight + by for name, weight in checkpoint(running).items()}
    running.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def ask(running: Engine, prompt: list[int], options: dict[str, Any] | None = SHIFT) -> Answer:
    [answer] = running.ask(prompt, options=options)
    return answer


def names(running: Engine, name: str) -> str:
    """vLLM appends to the names of requests; "" if there is none."""
    return next((i for i in running.scheduler.requests if i.startswith(name)), "")


def someone_decodes(running: Engine) -> None:
    text = Prompts(running.vocab_size, seed=9)
    submit(running, "decodes", text.tokens(20), None, max_tokens=200, ignore_eos=True)
    for _ in range(2):
        step(running)


def test_26_new_weights_alone_make_everything_unknown(running: Engine, text: Prompts) -> None:
    """Moved, an exact prefix, and in host memory: without a pause, and without a reset."""
    document = text.tokens(230)
    donor, question = text.around(document), text.around(document, gaps=(11, 7))
    ask(running, donor)
    old = ask(running, question)
    assert old.report["reused_tokens"] > 150
    evict(running, text)
    ask(running, donor)
    assert counts(running)["host"] > 0
    try:
        update(running, by=0.01)
        assert counts(running)["host"] == 0
        new = ask(running, question)
        assert (new.report["reused_tokens"], new.cached_tokens) == (0, 0)
        running.reset()
        assert_same(new, ask(running, question, None), NOISE)
        assert new.logprobs[0] != old.logprobs[0]
        again = ask(running, text.around(document, gaps=(5, 3)))
        assert again.report["bypass_reason"] == "too_few_reused_tokens", "plain ones donate nothing"
        ask(running, donor)
        assert ask(running, text.around(document, gaps=(3, 9))).report["reused_tokens"] > 150
    finally:
        update(running)


def test_26_weights_changed_by_any_other_method_are_noticed(running: Engine, text: Prompts) -> None:
    document = text.tokens(230)

    def reads(worker: Any) -> int:
        return sum(weight.numel() for weight in worker.get_model().parameters())

    def changes(worker: Any, by: int) -> None:
        weight = next(worker.get_model().parameters()).view(-1)
        with torch.no_grad():
            weight[7] = torch.nextafter(weight[7], weight[7] + by)  # the smallest change

    ask(running, text.around(document))
    running.llm.collective_rpc(reads)
    assert ask(running, text.around(document, gaps=(11, 7))).report["reused_tokens"] > 150
    for by in (1, -1):
        running.llm.collective_rpc(changes, args=(by,))
        asked = ask(running, text.around(document, gaps=(9, 3)))
        assert asked.report["reused_tokens"] == 0


def test_26_what_requests_hold_meanwhile_is_not_reused_until_a_reset(
    running: Engine, text: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM goes on with the KV that a request has; ours moves none of it, and stores none."""
    document = text.tokens(230)
    ask(running, text.around(document))
    someone_decodes(running)
    update(running)
    assert "the model's weights were changed while requests hold KV" in caplog.text
    for gaps in ((11, 7), (9, 3)):  # the first one would donate to the second
        submit(running, "asks", text.around(document, gaps=gaps), SHIFT)
        answers: dict[str, Answer] = {}
        while "asks" not in answers:
            answers |= step(running)
        report = answers["asks"].report
        assert (report["bypass_reason"], report["reused_tokens"]) == ("weights_changed", 0)
    stored = counts(running)["host"]
    abort(running, names(running, "decodes"))
    drain(running)
    evict(running, text)
    assert counts(running)["host"] == stored
    running.reset()
    ask(running, text.around(document))
    assert ask(running, text.around(document, gaps=(5, 3))).report["reused_tokens"] > 150


# A plan over several steps is under way.


@pytest.fixture
def under_way(running: Engine, text: Prompts) -> Iterator[tuple[Answer, Answer]]:
    """A request is set aside while its plan is carried out; how it answers without reuse, and if
    nothing comes in between."""
    document = text.tokens(300)
    prompt = text.around(document)
    plain = ask(running, prompt, None)
    running.reset()
    ask(running, document, NAMESPACE)
    alone = ask(running, prompt, SPREAD)
    assert alone.report["reused_tokens"] > 250
    running.reset()
    ask(running, document, NAMESPACE)
    someone_decodes(running)
    submit(running, "planned", prompt, SPREAD)
    step(running)
    assert status(running) == "WAITING_FOR_REMOTE_KVS"
    yield plain, alone
    if name := names(running, "decodes"):
        abort(running, name)


def status(running: Engine) -> str:
    name = names(running, "planned")
    return "" if not name else str(running.scheduler.requests[name].status.name)


def answered(running: Engine) -> Answer:
    answers: dict[str, Answer] = {}
    for _ in range(100):
        answers |= step(running)
        if "planned" in answers:
            return answers["planned"]
    raise AssertionError("it starves")


def test_26_a_pause_that_keeps_requests_keeps_a_plan(
    running: Engine, under_way: tuple[Answer, Answer]
) -> None:
    _, alone = under_way
    running.llm.sleep(level=0, mode="keep")
    for _ in range(8):
        running.llm.llm_engine.step()
    assert status(running) == "WAITING_FOR_REMOTE_KVS", "nobody runs"
    running.llm.wake_up(tags=["scheduling"])
    found = answered(running)
    assert found.report["reused_tokens"] == alone.report["reused_tokens"]
    assert_same(found, alone, NOISE)


@pytest.mark.parametrize("level", [1, 2])
def test_26_asleep_requests_that_are_kept_lose_their_plans(
    level: int, running: Engine, under_way: tuple[Answer, Answer]
) -> None:
    """On a CPU vLLM keeps the memory; what its scheduler does is the same."""
    plain, _ = under_way
    running.llm.sleep(level=level, mode="keep")
    assert running.llm.llm_engine.is_sleeping()
    assert running.pool.get_num_free_blocks() == running.pool.num_gpu_blocks - 1
    assert len(running.index) == 0
    running.llm.wake_up()
    found = answered(running)
    assert found.report["bypass_reason"] == "reset"
    assert_same(found, plain, NOISE)


def test_26_a_pause_that_aborts_requests_ends_a_plan(
    running: Engine, under_way: tuple[Answer, Answer]
) -> None:
    running.llm.sleep(level=0, mode="abort")
    # In one process vLLM does not tell its front end, which a server has told by the outputs.
    for name in ("planned", "decodes"):
        running.llm.llm_engine.abort_request([name])
    settle(running)
    assert not running.scheduler.requests
    running.check_idle()
    running.llm.wake_up(tags=["scheduling"])


def test_26_new_weights_in_the_middle_of_a_plan_that_is_kept(
    running: Engine, under_way: tuple[Answer, Answer]
) -> None:
    """The caller wants the request to go on with what it has. Nobody else does."""
    running.llm.sleep(level=0, mode="keep")
    update(running)
    running.llm.wake_up(tags=["scheduling"])
    assert answered(running).report["reused_tokens"] > 250
    submit(running, "planned", Prompts(running.vocab_size, seed=3).tokens(100), SHIFT)
    assert answered(running).report["bypass_reason"] == "weights_changed"
