# SPDX-License-Identifier: Apache-2.0
"""Spans in vLLM's OpenTelemetry traces (`--otlp-traces-endpoint`).

    segreuse.match   scheduler's process, once a request is admitted: the search for its prompt
    segreuse.plan    there, too, if it has a plan: what is computed was chosen, and room was made
    segreuse.pass    worker: from the step that a plan left with to the end of its last chunk

All are children of the trace context that came with the request, as vLLM's `llm_request` is
(`v1/engine/output_processor.py`). They have counts and options, and neither text nor namespaces.
Where tracing is off, no request has trace headers, and nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import SpanAttributes, extract_trace_context, instrument_manual

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from vllm_segreuse.scheduling.tracked import TrackedRequest

MATCH, PLAN, PASS = "segreuse.match", "segreuse.plan", "segreuse.pass"
_PREFIX = "segreuse."


def is_traced(vllm_config: VllmConfig) -> bool:
    """Whether vLLM exports traces."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


def headers_of(request: Request) -> Mapping[str, str]:
    """The context that a request came with, as vLLM's API server has read it."""
    return request.trace_headers or {}


def admitted_spans(tracked: TrackedRequest) -> None:
    """A request was admitted: `segreuse.match`, which is empty in time where nothing was searched
    for, and `segreuse.plan`, if there is one."""
    report, decision = tracked.report, tracked.decision
    if tracked.tags.trace_headers is None or report is None:
        return
    now_s = time.perf_counter()
    searched: dict[str, Any] = {
        "policy": tracked.method.policy,
        "prefix_tokens": report.prefix_tokens,
        "matched_tokens": 0 if decision.found is None else decision.found.num_tokens,
        "matches": decision.num_segments,
        "reused_tokens": report.reused_tokens,
        "new_tokens": report.new_tokens,
        "bypass_reason": report.bypass_reason,
    }
    since_epoch_ns = time.time_ns() - int(now_s * 1e9)
    spans = [(MATCH, decision.searched_s or (now_s, now_s), searched)]
    if (plan := tracked.plan) is not None and decision.planned_s is not None:
        planned: dict[str, Any] = {
            "recomputed_tokens": plan.num_recomputed,
            "donor_blocks": len(plan.donor_blocks),
        }
        spans.append((PLAN, decision.planned_s, planned))
    for name, seconds, attributes in spans:
        began_ns, ended_ns = (since_epoch_ns + int(at * 1e9) for at in seconds)
        span(name, tracked.request_id, tracked.tags.trace_headers, began_ns, ended_ns, attributes)


def span(
    name: str,
    request_id: str,
    headers: Mapping[str, str],
    began_ns: int,
    ended_ns: int,
    attributes: Mapping[str, Any],
) -> None:
    """Export a span of ours; attributes that are None are left out.

    Args:
        headers: the context that its request came with.
        began_ns, ended_ns: since the epoch.
    """
    known = {_PREFIX + key: value for key, value in attributes.items() if value is not None}
    instrument_manual(
        name,
        began_ns,
        ended_ns,
        attributes={SpanAttributes.GEN_AI_REQUEST_ID: request_id, **known},
        context=extract_trace_context(headers),
    )
