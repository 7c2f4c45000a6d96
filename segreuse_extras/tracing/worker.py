# SPDX-License-Identifier: Apache-2.0
"""Spans of passes in vLLM's traces."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from segreuse_extras.tracing.spans import PASS, is_traced, span
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill.executor import PassReport
from vllm_segreuse.prefill.feature import MakingWorker, WorkerFeature


class PassSpans(WorkerFeature):
    """Spans of the plans that a worker carries out.

    Args:
        rank: of the worker. All compute the same tokens; the first one writes spans.
    """

    name = "tracing"

    def __init__(self, rank: int) -> None:
        self._writes = rank == 0
        self._open: dict[str, tuple[ReusePlan, int]] = {}

    def begin_plans(self, plans: Iterable[ReusePlan]) -> None:
        """Plans of a step."""
        if self._writes:
            traced = [plan for plan in plans if plan.trace_headers is not None]
            self._open |= {plan.request_id: (plan, time.time_ns()) for plan in traced}

    def end_plans(self, request_ids: Iterable[str], report: PassReport) -> None:
        """Plans of these requests were carried out together."""
        found = {id_: self._open.pop(id_) for id_ in request_ids if id_ in self._open}
        for request_id, (plan, began_ns) in found.items():
            assert plan.trace_headers is not None
            attributes = _of_pass(plan, report)
            span(PASS, request_id, plan.trace_headers, began_ns, time.time_ns(), attributes)

    def drop_plans(self, request_ids: Iterable[str]) -> None:
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


def start(making: MakingWorker) -> PassSpans | None:
    """That of a worker; None: vLLM exports no traces."""
    config = making.vllm_config
    return PassSpans(config.parallel_config.rank) if is_traced(config) else None
