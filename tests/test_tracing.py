# SPDX-License-Identifier: Apache-2.0
"""Spans: what they say, whose they are, how long they took; and none unless vLLM exports traces."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_scheduler import DOCUMENT, OPTIONS, PROMPT, SEEN, World
from tests.test_worker import Backlog, report, worker_side
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.plan import AcceptanceOutcome, PlanOutcome, ReusePlan
from vllm_segreuse.prefill.worker import WorkerSide

pytest.importorskip("opentelemetry.sdk", reason="spans need OpenTelemetry's SDK, as vLLM's do")

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
ENDPOINT = "http://localhost:4317"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A call that returns the spans that have ended so far."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    for name in ("traceparent", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)
    yield exporter.get_finished_spans
    provider.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {key.removeprefix("segreuse."): value for key, value in span.attributes.items()}


def traced_world(**options: Any) -> World:
    """The document is cached; its own request was admitted before anybody looked."""
    world = World(traces=ENDPOINT, **options)
    request = world.add(DOCUMENT)
    world.run(request)
    world.side.finished(request, [])
    return world


# The search.


def test_a_search_is_a_child_of_the_requests_context(spans: Any) -> None:
    world = traced_world()
    before_ns = time.time_ns()
    request = world.add(PROMPT, trace_headers=HEADERS)
    world.run(request)
    _, span, plan = spans()
    assert (span.name, span.context.trace_id, span.parent.span_id) == (
        "segreuse.match",
        TRACE,
        PARENT,
    )
    assert before_ns - 1_000_000 < span.start_time < span.end_time < time.time_ns() + 1_000_000
    [search_s] = world.stats.data["match_seconds"][1:]
    assert span.end_time - span.start_time == pytest.approx(search_s * 1e9, abs=2_000)
    assert attributes(span) == {
        "gen_ai.request.id": request.request_id,
        "policy": "shift",
        "prefix_tokens": 0,
        "matched_tokens": 32,
        "matches": 1,
        "reused_tokens": 32,
        "new_tokens": 2,
    }
    assert (plan.name, plan.context.trace_id, plan.parent.span_id) == (
        "segreuse.plan",
        TRACE,
        PARENT,
    )
    assert span.end_time <= plan.start_time < plan.end_time < time.time_ns() + 1_000_000
    assert attributes(plan) == {
        "gen_ai.request.id": request.request_id,
        "recomputed_tokens": 0,
        "donor_blocks": 8,
    }


def test_a_request_without_a_context_has_a_trace_of_its_own(spans: Any) -> None:
    world = traced_world()
    world.run(world.add(PROMPT))
    document, prompt, _ = spans()
    assert prompt.parent is None
    assert prompt.context.trace_id not in (TRACE, document.context.trace_id)


@pytest.mark.parametrize(
    ("options", "reason", "matched"),
    [
        (OPTIONS | SEEN, "observed", 32),
        (OPTIONS | {"segreuse_min_reused_tokens": 33}, "too_few_reused_tokens", 32),
        (OPTIONS | {"segreuse_min_reused_tokens": 34}, "too_few_tokens", 0),
        (OPTIONS | {"extra_keys": "others"}, "too_few_reused_tokens", 0),
    ],
)
def test_why_nothing_was_reused(
    options: dict[str, Any], reason: str, matched: int, spans: Any
) -> None:
    world = traced_world()
    world.run(world.add(PROMPT, options, trace_headers=HEADERS))
    shown = attributes(spans()[-1])
    assert (shown["bypass_reason"], shown["matched_tokens"]) == (reason, matched)
    assert (shown["reused_tokens"], shown["new_tokens"]) == (0, 34)


@pytest.mark.parametrize("how", ["preempted", "called back"])
def test_the_first_admission_is_traced_and_no_other(how: str, spans: Any) -> None:
    """A reset that preempts calls plans back, and counts no preemption of those set aside."""
    world = traced_world()
    request = world.add(PROMPT)
    world.run(request)
    if how == "preempted":
        request.num_preemptions += 1
    else:
        world.side.call_back(request)
    world.run(request)
    expected = ["segreuse.match"] * 2 + ["segreuse.plan"]
    assert [span.name for span in spans()] == expected
    world.side.finished(request, [])
    request.num_preemptions = 0
    world.side.add(request)  # another one, of the same name
    world.run(request)
    assert "segreuse.match" in [span.name for span in spans()][len(expected) :]


def test_spans_hold_neither_text_nor_namespaces(spans: Any) -> None:
    world = traced_world()
    world.run(world.add(PROMPT, OPTIONS | {"extra_keys": "secret"}, cache_salt="salt"))
    shown = spans()[-1].to_json()
    assert "secret" not in shown
    assert "salt" not in shown
    assert all(isinstance(value, str | int) for value in spans()[-1].attributes.values())


def test_nothing_is_recorded_where_vllm_exports_no_traces(spans: Any) -> None:
    world = World()
    world.run(world.add(DOCUMENT, trace_headers=HEADERS))
    world.run(world.add(PROMPT, trace_headers=HEADERS))
    assert [plan.trace_headers for plan in world.plans] == [None]
    assert spans() == ()


# The pass.


def plan_of(headers: dict[str, str] | None = HEADERS, **changes: Any) -> ReusePlan:
    """The plan of a request, as the workers get it."""
    world = World(traces=None if headers is None else ENDPOINT)
    world.run(world.add(DOCUMENT))
    world.run(world.add(PROMPT, trace_headers=headers))
    [plan] = world.plans
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


@pytest.fixture
def backlog(monkeypatch: pytest.MonkeyPatch) -> Backlog:
    made = Backlog()
    made.stand_in(monkeypatch)
    return made


@pytest.fixture
def side(backlog: Backlog) -> WorkerSide:
    return worker_side(SegReuseStats(), traces=ENDPOINT)


def passes(spans: Any) -> list[Any]:
    return [span for span in spans() if span.name == "segreuse.pass"]


def test_a_pass_is_a_child_of_the_requests_context(
    side: WorkerSide, backlog: Backlog, spans: Any
) -> None:
    plan = plan_of()
    before_ns = time.time_ns()
    backlog.report = report()
    side.before_forward([plan])
    [span] = passes(spans)
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert before_ns <= span.start_time <= span.end_time <= time.time_ns()
    assert attributes(span) == {
        "gen_ai.request.id": plan.request_id,
        "program": "Fixed",
        "reused_tokens": 32,
        "recomputed_tokens": 0,
        "in_full": False,
        "rejected_tokens": 0,
        "spread": False,
        "align_s": 0.25,
        "compute_s": 0.5,
    }


def test_a_pass_shows_what_only_the_workers_know(
    side: WorkerSide, backlog: Backlog, spans: Any
) -> None:
    near, far, similar = plan_of(), plan_of(), plan_of()
    tested = AcceptanceOutcome((0.2, 0.9), added=9, again=14)
    backlog.report = report(
        outcomes={
            near.request_id: PlanOutcome(6, drift=0.5),
            far.request_id: PlanOutcome(6, drift=2.5, in_full=True),
            similar.request_id: PlanOutcome(6, acceptance=tested),
        }
    )
    side.before_forward([near, far, similar])
    shown = [attributes(span) for span in passes(spans)]
    assert [it["recomputed_tokens"] for it in shown] == [5, 32, 14]  # one token is new
    assert [it["in_full"] for it in shown] == [False, True, False]
    assert [it.get("drift") for it in shown] == [0.5, 2.5, None]
    assert [it["rejected_tokens"] for it in shown] == [0, 0, 9]


def test_a_plan_over_several_steps_is_one_span(
    side: WorkerSide, backlog: Backlog, spans: Any
) -> None:
    plan, small = plan_of(spread=True), plan_of()
    backlog.report = report()
    side.before_forward([plan, small])
    assert [attributes(span)["spread"] for span in passes(spans)] == [False]
    side.after_forward([], set())
    between_ns = time.time_ns()
    backlog.done = {plan.request_id: report()}
    side.after_forward([], set())
    span = passes(spans)[-1]
    assert attributes(span)["spread"]
    assert span.start_time < between_ns <= span.end_time
    backlog.done = {plan.request_id: report()}
    side.after_forward([], set())
    assert len(passes(spans)) == 2, "it is written once"


@pytest.mark.parametrize("called_back", [True, False])
def test_a_plan_that_is_dropped_is_no_span(
    called_back: bool, side: WorkerSide, backlog: Backlog, spans: Any
) -> None:
    plan = plan_of(spread=True)
    side.before_forward([plan])
    dropped = [plan.request_id]
    side.after_forward(dropped if called_back else [], set() if called_back else set(dropped))
    backlog.done = {plan.request_id: report()}
    side.after_forward([], set())
    assert passes(spans) == []


def test_one_of_several_ranks_writes(backlog: Backlog, spans: Any) -> None:
    backlog.report = report()
    worker_side(SegReuseStats(), rank=1).before_forward([plan_of()])
    assert passes(spans) == []


def test_plans_that_are_not_traced_leave_no_span(
    side: WorkerSide, backlog: Backlog, spans: Any
) -> None:
    backlog.report = report()
    side.before_forward([plan_of(headers=None)])
    assert spans() == ()


def test_without_opentelemetry_nothing_fails(
    side: WorkerSide, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then refuses the flag; this is who turns it on in another way."""
    from vllm.tracing import otel

    world = traced_world()
    backlog.report = report()
    monkeypatch.setattr(otel, "_IS_OTEL_AVAILABLE", False)
    monkeypatch.setattr(otel, "trace", SimpleNamespace())
    world.run(world.add(PROMPT, trace_headers=HEADERS))
    side.before_forward(world.plans)
