# SPDX-License-Identifier: Apache-2.0
"""Logits reach the recorder with the right rows and positions, before they are sampled from."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from segreuse_extras.audit.recorder import Sampled
from vllm_segreuse.compat import sampler


class Recorder:
    """What it has seen."""

    def __init__(self) -> None:
        self.is_idle = False
        self.seen: list[Any] = []

    def see(self, rows: Any, logits: Any) -> None:
        self.seen.append((list(rows), logits))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    sampler.watch(made)
    yield made
    sampler.watch(None)


Kind = type[GPUModelRunner] | type[Sampler] | type[RejectionSampler]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kind, str, Any], Any]:
    """Has the patch wrap a function in place of a class's own; returns it as it is wrapped."""

    def wrapped(kind: Kind, name: str, original: Any) -> Any:
        monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda self: None)
        for other in (Sampler, RejectionSampler):
            monkeypatch.setattr(other, "__call__", lambda self: None)
        monkeypatch.setattr(kind, name, original)
        sampler.install()
        sampler.install()
        return vars(kind)[name]

    return wrapped


def first_runner(drafts: list[int] | None) -> Any:
    """Three requests: a part of a prompt, the end of one, a token of an answer."""
    batch = SimpleNamespace(
        req_ids=["part", "end", "answer"],
        num_reqs=3,
        num_computed_tokens_cpu=np.array([0, 64, 100, 999], np.int32),
    )
    scheduled = {"part": 32, "end": 16, "answer": 1 + (drafts or [0] * 3)[2]}
    metadata = None if drafts is None else SimpleNamespace(num_draft_tokens=drafts)
    state = SimpleNamespace(
        scheduler_output=SimpleNamespace(num_scheduled_tokens=scheduled),
        spec_decode_metadata=metadata,
        logits="logits",
    )
    return SimpleNamespace(input_batch=batch, execute_model_state=state)


def second_batch(drafts: list[int] | None) -> Any:
    rows = np.cumsum([0] + [1 + number for number in drafts or [0] * 3])
    return SimpleNamespace(
        req_ids=["part", "end", "answer"],
        num_computed_tokens_np=np.array([0, 64, 100], np.int32),
        num_scheduled_tokens=np.array([32, 16, 1 + (drafts or [0] * 3)[2]], np.int32),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts, np.int32),
        cu_num_logits_np=rows,
    )


PLAIN = [Sampled("part", 0, 32), Sampled("end", 1, 80), Sampled("answer", 2, 101)]


@pytest.mark.parametrize("drafts", [None, [0, 0, 3]])
def test_the_first_runner_gives_its_logits_before_it_samples(
    drafts: list[int] | None, recorder: Recorder, wrap: Any
) -> None:
    def original(self: Any, grammar: Any) -> Any:
        return grammar, len(recorder.seen)

    runner = first_runner(drafts)
    sample = wrap(GPUModelRunner, "sample_tokens", original)
    assert sample(runner, "grammar") == ("grammar", 1)
    assert recorder.seen == [(PLAIN, "logits")]


def test_rows_of_drafts_are_passed_over(recorder: Recorder, wrap: Any) -> None:
    """Each request's first row follows what is known to be its text."""
    runner = first_runner([0, 2, 3])
    runner.execute_model_state.scheduler_output.num_scheduled_tokens["end"] = 18
    wrap(GPUModelRunner, "sample_tokens", lambda self: None)(runner)
    expected = [PLAIN[0], Sampled("end", 1, 80), Sampled("answer", 4, 101)]
    assert recorder.seen == [(expected, "logits")]


@pytest.mark.parametrize("kind", [Sampler, RejectionSampler])
@pytest.mark.parametrize("drafts", [None, [0, 0, 3]])
def test_the_samplers_of_the_second_runner_do_too(
    drafts: list[int] | None, kind: Kind, recorder: Recorder, wrap: Any
) -> None:
    def original(self: Any, logits: Any, batch: Any, *more: Any) -> Any:
        return logits, more, len(recorder.seen)

    sample = wrap(kind, "__call__", original)
    assert sample(None, "logits", second_batch(drafts), "drafts") == ("logits", ("drafts",), 1)
    assert recorder.seen == [(PLAIN, "logits")]


def test_the_second_runner_counts_rows_by_drafts_too(recorder: Recorder, wrap: Any) -> None:
    batch = second_batch([0, 2, 3])
    batch.num_scheduled_tokens[1] = 18
    wrap(Sampler, "__call__", lambda self, logits, batch: None)(None, "logits", batch)
    expected = [PLAIN[0], Sampled("end", 1, 80), Sampled("answer", 4, 101)]
    assert recorder.seen == [(expected, "logits")]


def test_nothing_is_looked_at_without_an_audit(recorder: Recorder, wrap: Any) -> None:
    recorder.is_idle = True
    runner = SimpleNamespace(execute_model_state=SimpleNamespace())
    call = wrap(Sampler, "__call__", lambda self, logits, batch: "sampled")
    assert call(None, 1, object()) == "sampled"
    sample = wrap(GPUModelRunner, "sample_tokens", lambda self: "sampled")
    assert sample(runner) == "sampled"
    recorder.is_idle = False
    assert sample(SimpleNamespace(execute_model_state=None)) == "sampled", "nothing ran"
    sampler.watch(None)
    assert sample(runner) == "sampled"
    assert recorder.seen == []


def test_what_is_read_of_vllms_runners_is_there() -> None:
    first = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    state = first.ExecuteModelState._fields
    assert {"scheduler_output", "logits", "spec_decode_metadata"} <= set(state)
    tree = ast.parse(textwrap.dedent(inspect.getsource(first.GPUModelRunner.sample_tokens)))
    called = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert "_sample" in called
    second = importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBatch
    read = {"req_ids", "num_computed_tokens_np", "num_scheduled_tokens", "cu_num_logits_np"}
    assert read | {"num_draft_tokens_per_req"} <= set(second.__dataclass_fields__)
    for module, name in (
        ("vllm.v1.worker.gpu.sample.sampler", "Sampler"),
        ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler"),
    ):
        call = getattr(importlib.import_module(module), name).__call__
        names = list(inspect.signature(inspect.unwrap(call)).parameters)
        assert names[:3] == ["self", "logits", "input_batch"]


def test_it_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[tuple[str, str]] = []
    monkeypatch.setattr(
        sampler, "wrap", lambda owner, name, make: wrapped.append((owner.__name__, name))
    )
    sampler.install()
    assert wrapped == [
        ("GPUModelRunner", "sample_tokens"),
        ("Sampler", "__call__"),
        ("RejectionSampler", "__call__"),
    ]
