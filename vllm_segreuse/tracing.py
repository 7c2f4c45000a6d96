# SPDX-License-Identifier: Apache-2.0
"""Spans in vLLM's OpenTelemetry traces (`--otlp-traces-endpoint`).

    segreuse.match   scheduler's process, once a request is admitted: the search for its prompt
    segreuse.pass    worker: from the step that a plan left with to the end of its last chunk

Both are children of the trace context that came with the request, as vLLM's `llm_request` is
(`v1/engine/output_processor.py`). They have counts and options, and neither text nor namespaces.
Where tracing is off, no request has trace headers, and nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import SpanAttributes, extract_trace_context, instrument_manual

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from vllm_segreuse.cache.tracked import TrackedRequest
    from vllm_segreuse.plan import ReusePlan
    from vllm_segreuse.prefill.executor import PassReport

MATCH, PASS = "segreuse.match", "segreuse.pass"
_PREFIX = "segreuse."


def is_traced(vllm_config: VllmConfig) -> bool:
    """Whether vLLM exports traces."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


def headers_of(request: Request) -> Mapping[str, str]:
    """The context that a request came with, as vLLM's API server has read it."""
    return request.trace_headers or {}


def match_span(tracked: TrackedRequest) -> None:
    """A request was admitted. Its span is empty in time where nothing was searched for."""
    report, decision = tracked.report, tracked.decision
    if tracked.tags.trace_headers is None or report is None:
        return
    now_s = time.perf_counter()
    began_s, ended_s = decision.searched_s or (now_s, now_s)
    attributes = {
        "policy": tracked.method.policy,
        "prefix_tokens": report.prefix_tokens,
        "matched_tokens": 0 if decision.found is None else decision.found.num_tokens,
        "matches": decision.num_segments,
        "reused_tokens": report.reused_tokens,
        "new_tokens": report.new_tokens,
        "bypass_reason": report.bypass_reason,
    }
    since_epoch_ns = time.time_ns() - int(now_s * 1e9)
    began_ns, ended_ns = (since_epoch_ns + int(at * 1e9) for at in (began_s, ended_s))
    _span(MATCH, tracked.request_id, tracked.tags.trace_headers, began_ns, ended_ns, attributes)


class PassSpans:
    """Spans of the plans that a worker carries out.

    Args:
        rank: of the worker. All compute the same tokens; the first one writes spans.
    """

    def __init__(self, rank: int) -> None:
        self._writes = rank == 0
        self._open: dict[str, tuple[ReusePlan, int]] = {}

    def begin(self, plans: Iterable[ReusePlan]) -> None:
        """Plans of a step."""
        if self._writes:
            traced = [plan for plan in plans if plan.trace_headers is not None]
            self._open |= {plan.request_id: (plan, time.time_ns()) for plan in traced}

    def end(self, request_ids: Iterable[str], report: PassReport) -> None:
        """Plans of these requests were carried out together."""
        found = {id_: self._open.pop(id_) for id_ in request_ids if id_ in self._open}
        for request_id, (plan, began_ns) in found.items():
            assert plan.trace_headers is not None
            attributes = _of_pass(plan, report)
            _span(PASS, request_id, plan.trace_headers, began_ns, time.time_ns(), attributes)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Requests whose plans are not carried out to the end."""
        for request_id in request_ids:
            self._open.pop(request_id, None)


def _of_pass(plan: ReusePlan, report: PassReport) -> dict[str, Any]:
    outcome = report.outcomes.get(plan.request_id)
    return {
        "program": type(plan.recipe.program).__name__,
        "reused_tokens": plan.num_restored + plan.num_reused,
        "recomputed_tokens": plan.recomputed_after(outcome),
        "drift": outcome and outcome.drift,
        "in_full": bool(outcome and outcome.in_full),
        "rejected_tokens": outcome.acceptance.added if outcome and outcome.acceptance else 0,
        "spread": plan.spread,
        "align_s": report.align_s,
        "compute_s": report.sparse_s,
    }


def _span(
    name: str,
    request_id: str,
    headers: Mapping[str, str],
    began_ns: int,
    ended_ns: int,
    attributes: Mapping[str, Any],
) -> None:
    known = {_PREFIX + key: value for key, value in attributes.items() if value is not None}
    instrument_manual(
        name,
        began_ns,
        ended_ns,
        attributes={SpanAttributes.GEN_AI_REQUEST_ID: request_id, **known},
        context=extract_trace_context(headers),
    )
