# SPDX-License-Identifier: Apache-2.0
"""Errors inside of segment reuse cost a request its reuse, never the engine (failure cases 27)."""

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import drain, resident, submit
from tests.e2e.test_equality import assert_same
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.prefill.align import Aligner

OPTIONS = NAMESPACE | {"segreuse_min_reused_tokens": 16, "segreuse_policy": "sparsex"}
SHIFT = OPTIONS | {"segreuse_policy": "shift"}
EXACT = OPTIONS | {"segreuse_policy": "exact"}
EVERYTHING = OPTIONS | {"segreuse_recompute_ratio": 1.0}
SELECTED = OPTIONS | {"segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 1}
SCATTERED = SELECTED | {"segreuse_overflow_tokens": 0}  # so that few of the chosen are neighbours
FOCUS = SELECTED | {"segreuse_policy": "focus"}
NOISE = 2e-3  # of float32

# What runs before vLLM has allocated a request's blocks.
DECIDING = {
    "scheduling.planner.Planner.decide": SHIFT,
    "cache.finder.find_matches": SHIFT,
    "plan.Pieces.reused": SHIFT,
    "cache.prompt.window_hashes": SHIFT,
    "compat.block_pool.SegmentBlockPool.prefix_state": SHIFT,
    "compat.block_pool.SegmentBlockPool.resident_blocks": EXACT,
    "compat.block_pool.SegmentBlockPool.idle": SHIFT,
    "compat.block_pool.SegmentBlockPool.pin": SHIFT,
    "scheduling.methods.Methods.recipe": SHIFT,
}
# What runs when a request arrives, has got its blocks, or ends.
ELSEWHERE = [
    "scheduling.admission.parse_request",
    "scheduling.admission.namespace_of",
    "scheduling.admission.bypass_reason",
    "scheduling.planner.Planner.add",
    "scheduling.donors.Donors.index_prefix",
    "scheduling.reporting.Accounts._count",
    "scheduling.planner.Report",
    "scheduling.planner.Planner.remove",
]
# What serves all requests at once.
SHARED = [
    "cache.index.SegmentIndex.begin_step",
    "cache.index.SegmentIndex.remove",
    "cache.index.SegmentIndex.clear",
]
# What runs in a worker, and for whom.
WORKING = {
    "prefill.executor.token_copies": SHIFT,
    "prefill.executor.Batch": SHIFT,
    "model.rope.DeltaRope.tables": SHIFT,
    "prefill.attention.ScatteredQueries": SHIFT,
    "kernels.cpu.call": SHIFT,
    "model.layers.DecoderStack.embed": SHIFT,
    "model.layers.DecoderStack.run": SHIFT,
    "model.layers.DecoderStack.write_kv": SHIFT,
    "prefill.attention.PassAttention._attend": SCATTERED,
    "prefill.layer_runner.LayerRunner.attention_scores": SELECTED,
    "prefill.selection.choose": SELECTED,
    "model.layers.DecoderStack.keys_and_values": SELECTED | {"segreuse_policy": "cacheblend"},
    "prefill.scores.Scores._ask": FOCUS,
}

Break = Callable[..., list[str]]


class OnPurposeError(Exception):
    """Raised by the tests."""


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    with engine("qwen3", dtype="float32", max_model_len=1024) as running:
        yield running


def documents_and_prompt(running: Engine) -> tuple[list[list[int]], list[int]]:
    text = Prompts(running.vocab_size, seed=41)
    documents = [text.tokens(160), text.tokens(224)]
    return documents, text.around(*documents)


@pytest.fixture(scope="module")
def reference(reusing: Engine) -> Answer:
    """The prompt's answer without reuse."""
    return reusing.ask(documents_and_prompt(reusing)[1])[0]


@pytest.fixture
def prompt(reusing: Engine, reference: Answer) -> list[int]:
    """A prompt whose documents are cached."""
    reusing.reset()
    documents, prompt = documents_and_prompt(reusing)
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    return prompt


@pytest.fixture
def break_function() -> Iterator[Break]:
    """Let a function raise, its first `times` calls only; returns the growing list of them."""
    with pytest.MonkeyPatch.context() as patch:

        def break_function(name: str, times: int = 10**6) -> list[str]:
            calls: list[str] = []
            original = pkgutil.resolve_name(f"vllm_segreuse.{name}")

            def raising(*args: Any, **kwargs: Any) -> Any:
                if len(calls) >= times:
                    return original(*args, **kwargs)
                calls.append(name)
                raise OnPurposeError(name)

            patch.setattr(f"vllm_segreuse.{name}", raising)
            return calls

        break_function.mend = patch.undo  # type: ignore[attr-defined]
        yield break_function


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What segment reuse has logged as errors, with their tracebacks."""

    def errors() -> list[str]:
        return [
            f"{record.getMessage()} {record.exc_text}"
            for record in caplog.records
            if record.name == "vllm.segreuse" and record.levelname == "ERROR"
        ]

    return errors


def ask_named(running: Engine, name: str, prompt: list[int], options: dict[str, Any]) -> Answer:
    """One request under an id of our choice."""
    submit(running, name, prompt, options)
    return drain(running)[name]


def check_alive(running: Engine, prompt: list[int]) -> None:
    """Nothing is held, and the next request reuses."""
    running.check_idle()
    assert running.ask([7, *prompt], options=SHIFT)[0].report["reused_tokens"] >= 384
    running.check_idle()


@pytest.mark.parametrize("broken", DECIDING)
def test_27_an_error_before_admission_costs_the_reuse(
    reusing: Engine,
    prompt: list[int],
    reference: Answer,
    break_function: Break,
    errors: Callable[[], list[str]],
    broken: str,
) -> None:
    calls = break_function(broken)
    answer = ask_named(reusing, "unlucky", prompt, DECIDING[broken])
    assert calls
    assert answer.report["bypass_reason"] == "error"
    assert answer.report["new_tokens"] == len(prompt)
    assert_same(answer, reference, NOISE)
    (logged,) = errors()
    assert "unlucky" in logged
    break_function.mend()
    check_alive(reusing, prompt)


@pytest.mark.parametrize("broken", ELSEWHERE)
def test_27_an_error_elsewhere_leaves_answer_and_engine_alone(
    reusing: Engine,
    prompt: list[int],
    reference: Answer,
    break_function: Break,
    errors: Callable[[], list[str]],
    broken: str,
) -> None:
    calls = break_function(broken)
    answer = ask_named(reusing, "unlucky", prompt, EVERYTHING)
    assert len(calls) == 1
    assert_same(answer, reference, NOISE)
    (logged,) = errors()
    assert "unlucky" in logged
    break_function.mend()
    check_alive(reusing, prompt)


def test_27_an_error_over_what_the_workers_chose_leaves_answer_and_engine_alone(
    reusing: Engine,
    prompt: list[int],
    errors: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = ask_named(reusing, "lucky", prompt, FOCUS)
    inc = SegReuseStats.inc

    def count(self: SegReuseStats, name: str, n: int = 1, **labels: str) -> None:
        if labels.get("kind") == "recomputed":  # counted for `focus` once its workers have told
            raise OnPurposeError(name)
        inc(self, name, n, **labels)

    reusing.reset()
    reusing.ask(*documents_and_prompt(reusing)[0], options=NAMESPACE, max_tokens=1)
    monkeypatch.setattr(SegReuseStats, "inc", count)
    assert_same(ask_named(reusing, "unlucky", prompt, FOCUS), expected, NOISE)
    (logged,) = errors()
    assert "unlucky" in logged
    monkeypatch.undo()
    check_alive(reusing, prompt)


@pytest.mark.parametrize("broken", SHARED)
def test_27_an_error_over_what_all_share_stops_reuse_until_a_reset(
    reusing: Engine,
    prompt: list[int],
    reference: Answer,
    break_function: Break,
    errors: Callable[[], list[str]],
    broken: str,
) -> None:
    calls = break_function(broken, times=1)
    last = reusing.ask(prompt, options=EVERYTHING)[0]
    assert_same(last, reference, NOISE)
    if not calls:
        reusing.reset() if broken.endswith("clear") else evict_all(reusing)
    assert len(calls) == 1
    answer = reusing.ask(prompt, options=SHIFT)[0]
    assert answer.report["bypass_reason"] == "error"
    assert_same(answer, reference, NOISE)
    (logged,) = errors()
    assert "off until the prefix cache is reset" in logged
    assert len(calls) == 1
    break_function.mend()
    reusing.reset()
    documents, _ = documents_and_prompt(reusing)
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    check_alive(reusing, prompt)


def evict_all(running: Engine) -> None:
    """Somebody needs every block."""
    pool = running.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))


@pytest.mark.parametrize("broken", WORKING)
def test_27_an_error_in_the_pass_computes_its_plans_in_full(
    reusing: Engine,
    prompt: list[int],
    reference: Answer,
    break_function: Break,
    errors: Callable[[], list[str]],
    broken: str,
) -> None:
    calls = break_function(broken, times=1)
    answer = ask_named(reusing, "unlucky", prompt, WORKING[broken])
    assert len(calls) == 1
    assert_same(answer, reference, NOISE)
    if answer.report["policy"] == "focus":  # its workers tell what they did
        assert answer.report["recomputed_tokens"] == answer.report["reused_tokens"] > 0
    (logged,) = errors()
    assert "unlucky" in logged
    assert "OnPurposeError" in logged
    check_alive(reusing, prompt)


def test_27_an_error_in_an_exact_pass_computes_its_plan_in_full(
    reusing: Engine, reference: Answer, break_function: Break, errors: Callable[[], list[str]]
) -> None:
    prompt = documents_and_prompt(reusing)[1]
    reusing.reset()
    reusing.ask(prompt, options=NAMESPACE)
    reusing.pool.evict_blocks({resident(reusing, prompt)[1]})
    calls = break_function("model.layers.DecoderStack.forward_for_drafts", times=1)
    answer = ask_named(reusing, "unlucky", prompt, EXACT)
    assert len(calls) == 1
    assert answer.report["exact_tokens"] > 300
    assert_same(answer, reference, NOISE)
    (logged,) = errors()
    assert "unlucky" in logged
    check_alive(reusing, prompt)


@pytest.mark.parametrize("options", [SHIFT, SCATTERED, FOCUS], ids=["shift", "scattered", "focus"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_30_a_spoilt_donor_is_not_reused(
    reusing: Engine,
    prompt: list[int],
    reference: Answer,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    value: float,
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    prefill = get_kv_transfer_group().worker_side.backlog.prefill
    layers = prefill.aligner.layers
    kernels = layers[0].kernels
    align = kernels.align

    def spoil(pages: list[torch.Tensor], parts: Any, moves: Any) -> None:
        align(pages, parts, moves)
        block = int(moves.targets[0]) // parts[0].strides.shape[1]
        parts[1].strides.view(pages[0][block][None]).fill_(value)

    spoiling = replace(kernels, align=spoil)
    with pytest.MonkeyPatch.context() as patch:
        aligner = Aligner([replace(layer, kernels=spoiling) for layer in layers])
        patch.setattr(prefill, "aligner", aligner)
        answer = ask_named(reusing, "spoilt", prompt, options)
    assert_same(answer, reference, NOISE)
    assert "NaN or infinity; computed in full: ['spoilt" in caplog.text
    if answer.report["policy"] == "focus":  # its workers tell what they did
        assert answer.report["recomputed_tokens"] == answer.report["reused_tokens"] > 0
    check_alive(reusing, prompt)


def test_without_an_error_the_same_requests_answer_otherwise(
    reusing: Engine, prompt: list[int], reference: Answer
) -> None:
    """Else "right behind an error" would say nothing."""
    for options in (SHIFT, SELECTED):
        answer = reusing.ask(prompt, options=options)[0]
        with pytest.raises(AssertionError, match="log-probabilities differ"):
            assert_same(answer, reference, 5 * NOISE)
