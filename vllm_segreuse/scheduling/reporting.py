# SPDX-License-Identifier: Apache-2.0
"""What requests did not have to compute: in their reports, in vLLM's figures, and in ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.plan import AcceptanceOutcome, Check, ModelLayers, PlanOutcome, ReusePlan
from vllm_segreuse.scheduling.tracked import Report, TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Accounts:
    """One per engine.

    Args:
        stats: where it is counted.
        layers: of the model.
    """

    def __init__(self, stats: Counted, layers: ModelLayers) -> None:
        self._stats = stats
        self._awaited: dict[str, ReusePlan] = {}  # by request: its report is about this plan
        self.layers = layers

    def admitted(self, tracked: TrackedRequest, request: Request, report: Report) -> None:
        """A request was admitted for the first time.

        How a plan ends that reports it is not known yet; `carried_out` is called once it is, or if
        another one was computed in full.
        """
        plan = tracked.plan
        if plan is not None:
            prefix = report.prefix_tokens
            share = plan.computed_share(self.layers, request.num_tokens, prefix=prefix)
            report = report._replace(computed_share=share)
            self._awaited[tracked.request_id] = plan
        elif report.reused_tokens:  # taken as it is
            share = report.new_tokens / (report.new_tokens + report.reused_tokens)
            report = report._replace(computed_share=round(share, 4))
        elif tracked.observed is not None:
            report = report._replace(observed=self._observed(tracked, request.num_tokens))
        counts = tracked.report is None  # else its plan was called back: it is counted once
        tracked.report = report
        if counts:
            self._count(report, recomputed=plan is None or not plan.reports)
        if report.reused_tokens:
            _note_saved(request, report)

    def forget(self, request_id: str) -> None:
        """A request has ended, or its plan is not carried out."""
        self._awaited.pop(request_id, None)

    def carried_out(
        self, tracked: TrackedRequest, request: Request, outcome: PlanOutcome
    ) -> ReusePlan | None:
        """The workers have carried the awaited plan out.

        Returns:
            That plan; None: the outcome is of another one.
        """
        plan = self._awaited.get(tracked.request_id)
        if tracked.report is None or plan is None:
            return None  # readmitted meanwhile: the report is about the first admission
        if not plan.reports and tracked.plan is not plan:
            return None  # likewise
        del self._awaited[tracked.request_id]
        recomputed = plan.recomputed_after(outcome)
        counted = 0 if plan.reports else tracked.report.recomputed_tokens
        prefix = tracked.report.prefix_tokens
        share = plan.computed_share(self.layers, request.num_prompt_tokens, outcome, prefix)
        drift = None if outcome.drift is None else round(outcome.drift, 4)
        tracked.report = tracked.report._replace(
            recomputed_tokens=recomputed,
            computed_share=share,
            drift=drift,
            in_full=outcome.in_full,
        )
        _note_saved(request, tracked.report)
        self._stats.inc("tokens_total", recomputed - counted, kind="recomputed")
        if outcome.drift is not None:
            self._stats.observe("drift", outcome.drift)
            self._stats.inc("in_full_total", int(outcome.in_full))
        if plan.check is not None and outcome.acceptance is not None:
            self._tested(tracked, plan.check, outcome.acceptance)
        return plan

    def _tested(self, tracked: TrackedRequest, check: Check, outcome: AcceptanceOutcome) -> None:
        """Similar segments of a plan were accepted or rejected."""
        assert tracked.report is not None
        is_rejected = check.is_rejected(outcome.drifts)
        rejected = int(is_rejected.sum())
        tracked.report = tracked.report._replace(
            accepted_segments=is_rejected.size - rejected,
            rejected_segments=rejected,
            rejected_tokens=outcome.added,
        )
        for drift in filter(math.isfinite, outcome.drifts):
            self._stats.observe("boundary_drift", drift)
        self._stats.inc("similar_segments_total", is_rejected.size - rejected, outcome="accepted")
        self._stats.inc("similar_segments_total", rejected, outcome="rejected")

    def _observed(self, tracked: TrackedRequest, num_tokens: int) -> dict[str, int | float]:
        """What the plan that is not carried out would have come to."""
        plan, tracked.observed = tracked.observed, None
        assert plan is not None
        reused = plan.num_restored + plan.num_reused
        observed = {
            "reused_tokens": reused,
            "recomputed_tokens": plan.num_recomputed,
            "computed_share": plan.computed_share(self.layers, num_tokens),
            "matches": tracked.decision.num_segments,
            "similar_tokens": plan.pieces.num_similar,
        }
        self._stats.inc("observed_tokens_total", reused, kind="reused")
        self._stats.inc("observed_tokens_total", plan.num_recomputed, kind="recomputed")
        return observed

    def _count(self, report: Report, recomputed: bool) -> None:
        self._stats.inc("tokens_total", report.prefix_tokens, kind="prefix")
        self._stats.inc("tokens_total", report.reused_tokens, kind="reused")
        self._stats.inc("tokens_total", report.exact_tokens, kind="exact")
        self._stats.inc("tokens_total", report.similar_tokens, kind="similar")
        self._stats.inc("tokens_total", report.entering_tokens, kind="entering")
        self._stats.inc("tokens_total", report.tiered_tokens, kind="tiered")
        if recomputed:
            self._stats.inc("tokens_total", report.recomputed_tokens, kind="recomputed")
        self._stats.inc("tokens_total", report.new_tokens, kind="new")
        if report.bypass_reason is None:
            self._stats.inc("requests_total", outcome="reused", reason="")
        else:
            self._stats.inc("requests_total", outcome="bypassed", reason=report.bypass_reason)


def _note_saved(request: Request, report: Report) -> None:
    """vLLM has noted "everything but the last token"; correct it to what is saved."""
    if request.prefill_stats is not None:
        request.prefill_stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=report.prefix_tokens,
            num_external_cached_tokens=report.reused_tokens - report.recomputed_tokens,
        )
