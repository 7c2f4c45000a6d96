# SPDX-License-Identifier: Apache-2.0
"""What requests did not have to compute: in their reports, in vLLM's figures, and in ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.cache.explain import with_acceptance, with_recomputed
from vllm_segreuse.cache.frozen import FrozenPool
from vllm_segreuse.cache.tracked import Report, TrackedRequest
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.plan import (
    Acceptance,
    AcceptanceOutcome,
    ModelLayers,
    PlanOutcome,
    ReusePlan,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Accounts:
    """One per engine.

    Args:
        stats: where it is counted.
        layers: of the model.
    """

    def __init__(self, stats: SegReuseStats, layers: ModelLayers) -> None:
        self._stats = stats
        self._frozen = 0
        self.layers = layers

    def admitted(self, tracked: TrackedRequest, request: Request, report: Report) -> None:
        """A request was admitted for the first time.

        How a plan ends that reports it is not known yet; `carried_out` is called once it is, or if
        another one was computed in full.
        """
        plan = tracked.plan
        if plan is not None:
            share = plan.computed_share(self.layers, request.num_tokens)
            report = report._replace(computed_share=share)
            tracked.awaited = plan
        elif tracked.observed is not None:
            report = report._replace(observed=self._observed(tracked, request.num_tokens))
        tracked.report = report
        self._count(report, recomputed=plan is None or not plan.reports)
        if plan is not None:
            _note_saved(request, report)

    def carried_out(self, tracked: TrackedRequest, request: Request, outcome: PlanOutcome) -> None:
        """The workers have carried the awaited plan out."""
        plan = tracked.awaited
        if tracked.report is None or plan is None:
            return  # readmitted meanwhile: the report is about the first admission
        if not plan.reports and tracked.plan is not plan:
            return  # likewise
        tracked.awaited = None
        recomputed = plan.recomputed_after(outcome)
        counted = 0 if plan.reports else tracked.report.recomputed_tokens
        share = plan.computed_share(self.layers, plan.stop + 1, outcome)
        drift = None if outcome.drift is None else round(outcome.drift, 4)
        tracked.report = tracked.report._replace(
            recomputed_tokens=recomputed,
            computed_share=share,
            drift=drift,
            in_full=outcome.in_full,
        )
        if tracked.explanation is not None and outcome.positions is not None:
            positions = np.asarray(outcome.positions, np.int32)
            tracked.explanation = with_recomputed(tracked.explanation, positions)
        _note_saved(request, tracked.report)
        self._stats.inc("tokens_total", recomputed - counted, kind="recomputed")
        if outcome.drift is not None:
            self._stats.observe("drift", outcome.drift)
            self._stats.inc("in_full_total", int(outcome.in_full))
        if plan.acceptance is not None and outcome.acceptance is not None:
            self._tested(tracked, plan, plan.acceptance, outcome.acceptance)

    def _tested(
        self,
        tracked: TrackedRequest,
        plan: ReusePlan,
        acceptance: Acceptance,
        outcome: AcceptanceOutcome,
    ) -> None:
        """Similar segments of a plan were accepted or rejected."""
        assert tracked.report is not None
        is_rejected = acceptance.is_rejected(outcome.drifts)
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
        if tracked.explanation is not None:
            tracked.explanation = with_acceptance(
                tracked.explanation, plan.start, acceptance, outcome.drifts
            )

    def frozen(self, entries: FrozenPool) -> None:
        """A scheduling step is over: how much knowledge bases keep."""
        if entries.num_frozen != self._frozen:
            self._frozen = entries.num_frozen
            self._stats.set("frozen_share", self._frozen / entries.num_blocks)

    def _observed(self, tracked: TrackedRequest, num_tokens: int) -> dict[str, int | float]:
        """What the plan that is not carried out would have come to."""
        plan, tracked.observed = tracked.observed, None
        assert plan is not None
        reused = plan.num_restored + plan.num_reused
        observed = {
            "reused_tokens": reused,
            "recomputed_tokens": plan.num_recomputed,
            "computed_share": plan.computed_share(self.layers, num_tokens),
            "matches": tracked.num_segments,
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
