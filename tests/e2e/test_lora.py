# SPDX-License-Identifier: Apache-2.0
"""Requests of several LoRA adapters and of the base model reuse in one step, each with its own
(failure case 34).

As a script, this file is the engine of two ranks:
    python -m tests.e2e.test_lora ANSWERS.json DIRECTORY
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from bench.shapes import SHAPES
from tests.e2e.adapters import RANK, write_adapter
from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.test_equality import EVERYTHING, WAYS, assert_same

pytestmark = pytest.mark.patches("lora_manager")

SHAPE = "qwen3"
NOISE = 2e-3  # of float32
CORES = sorted(os.sched_getaffinity(0))
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 4,
    "max_lora_rank": RANK,
}
"""With a slot more than there are adapters: on CPUs, vLLM 0.32 applies what the last slot holds to
tokens without an adapter, if others of their batch have one (`lora/ops/torch_ops`)."""
MORE_WAYS = WAYS | {
    "scored at all layers": EVERYTHING | {"segreuse_policy": "prophet"},
    "compared behind a dense layer": EVERYTHING | {"segreuse_policy": "cacheblend"},
}
Adapters = list[LoRARequest | None]


def adapters_in(directory: Path) -> Adapters:
    """Two adapters, with none between them, and a third."""
    config = SHAPES[SHAPE].config
    one, two, three = (
        LoRARequest(f"adapter {i}", i, str(write_adapter(directory / str(i), config, seed=i)))
        for i in (1, 2, 3)
    )
    return [one, None, two, three]


def documents_and_prompts(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    text = Prompts(vocab_size, seed=41)
    documents = [text.tokens(300), text.tokens(200)]
    return documents, [text.around(documents[1], documents[0]), text.around(documents[0])]


def ask_all(
    running: Engine, prompts: list[list[int]], adapters: Adapters, **more: Any
) -> list[Answer]:
    """Every prompt with every adapter, together."""
    asked = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    return running.ask(*(p for p, _ in asked), adapters=[a for _, a in asked], **more)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return adapters_in(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def expected(adapters: Adapters) -> list[Answer]:
    """What vLLM without the plugin answers."""
    with engine(SHAPE, segreuse=False, **ENGINE) as plain:
        _, prompts = documents_and_prompts(plain.vocab_size)
        return ask_all(plain, prompts, adapters[:3])


@pytest.fixture(scope="module")
def running(expected: list[Answer]) -> Iterator[Engine]:
    """Plans without an adapter are carried out over several steps."""
    with engine(SHAPE, segreuse={"spread_tokens": 64}, **ENGINE) as started:
        yield started


def cached(running: Engine, adapters: Adapters) -> list[list[int]]:
    """Prompts of documents that were read with each of these adapters."""
    documents, prompts = documents_and_prompts(running.vocab_size)
    running.reset()
    ask_all(running, documents, adapters, options=NAMESPACE, max_tokens=1)
    return prompts


def test_the_adapters_answer_differently(expected: list[Answer]) -> None:
    for other in expected[1:3]:
        with pytest.raises(AssertionError):
            assert_same(expected[0], other, 20 * NOISE)


@pytest.mark.shows("lora", family=SHAPE)
@pytest.mark.parametrize("way", MORE_WAYS)
def test_34_recomputing_everything_equals_plain_vllm_with_the_same_adapters(
    way: str, running: Engine, adapters: Adapters, expected: list[Answer]
) -> None:
    prompts = cached(running, adapters[:3])
    answers = ask_all(running, prompts, adapters[:3], options=MORE_WAYS[way])
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours.report["bypass_reason"] is None
        assert ours.report["reused_tokens"] > 200
        assert_same(ours, theirs, NOISE)
    running.check_idle()


def test_34_a_document_of_one_adapter_is_not_reused_for_another(
    running: Engine, adapters: Adapters
) -> None:
    for reader in adapters:
        prompts = cached(running, [reader])
        for asking in adapters:
            options = NAMESPACE | {"segreuse_policy": "shift"}
            [answer] = running.ask(prompts[1], options=options, adapters=[asking])
            assert bool(answer.report["reused_tokens"]) == (asking is reader)
            assert answer.report["prefix_tokens"] == 0


def test_34_who_reuses_nothing_is_answered_as_if_alone(running: Engine, adapters: Adapters) -> None:
    """To the last bit: behind a pass the step has its adapters again. Of who reuses it computes
    one token each: products of more rows are rounded otherwise."""
    prompts = cached(running, adapters[:3])
    alone = [running.ask(prompts[1], adapters=[adapter])[0] for adapter in adapters[:3]]
    prompts = cached(running, adapters[:3])
    *reusing, first, second, third = running.ask(
        *[prompts[0]] * 3,
        *[prompts[1]] * 3,
        adapters=adapters[:3] * 2,
        options=[NAMESPACE | {"segreuse_policy": "cacheblend"}] * 3 + [None] * 3,
    )
    assert all(answer.report["reused_tokens"] for answer in reusing)
    assert [first, second, third] == alone


def test_34_a_pass_that_fails_leaves_every_request_its_adapter(
    running: Engine,
    adapters: Adapters,
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those whose tokens vLLM computes itself in the same step."""
    from vllm_segreuse.model.layers import DecoderStack

    run, failed = DecoderStack.run, []

    def fail_once(self: Any, *given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ArithmeticError("on purpose")
        return run(self, *given)

    prompts = cached(running, [adapters[0]])
    monkeypatch.setattr(DecoderStack, "run", fail_once)
    answers = ask_all(running, prompts, adapters[:3], options=WAYS["two dense layers"])
    assert failed
    for ours, theirs in zip(answers, expected, strict=True):
        assert_same(ours, theirs, NOISE)


def test_34_an_adapter_that_cannot_be_loaded_is_vllms_own_error(
    running: Engine, adapters: Adapters, expected: list[Answer]
) -> None:
    with pytest.raises(Exception, match="ghost"):
        running.llm.llm_engine.add_lora(LoRARequest("ghost", 9, "/nowhere"))
    prompts = cached(running, adapters[:3])
    answers = ask_all(running, prompts, adapters[:3], options=EVERYTHING)
    for ours, theirs in zip(answers, expected, strict=True):
        assert_same(ours, theirs, NOISE)


@pytest.mark.slow("two ranks", instead="e2e/test_lora e2e/test_tensor_parallel")
@pytest.mark.skipif(len(CORES) < 2, reason="each of two ranks needs a CPU of its own")
def test_34_two_ranks_answer_as_one(
    tmp_path: Path, adapters: Adapters, expected: list[Answer]
) -> None:
    written = tmp_path / "answers.json"
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_lora", written, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    answers = json.loads(written.read_text())
    for fields, theirs in zip(answers, expected, strict=True):
        logprobs = [{int(t): p for t, p in step.items()} for step in fields.pop("logprobs")]
        ours = Answer(**fields, logprobs=logprobs)
        assert ours.report["reused_tokens"] > 200
        assert_same(ours, theirs, NOISE)


if __name__ == "__main__":
    used = adapters_in(Path(sys.argv[2]))[:3]
    with engine(SHAPE, tensor_parallel_size=2, **ENGINE) as two_ranks:
        found = ask_all(two_ranks, cached(two_ranks, used), used, options=EVERYTHING)
        Path(sys.argv[1]).write_text(json.dumps([dataclasses.asdict(a) for a in found]))
