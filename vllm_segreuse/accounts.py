# SPDX-License-Identifier: Apache-2.0
"""What requests did not have to compute: in their reports, in vLLM's figures, and in ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_segreuse.cache.tracked import Report, TrackedRequest
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.plan import ReusePlan

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Accounts:
    """One per engine.

    Args:
        stats: where it is counted.
        num_layers: of the model.
    """

    def __init__(self, stats: SegReuseStats, num_layers: int) -> None:
        self._stats = stats
        self._num_layers = num_layers

    def admitted(self, tracked: TrackedRequest, request: Request, report: Report) -> None:
        """A request was admitted for the first time.

        How much a counted plan recomputes is not known yet; `computed` is called once it is.
        """
        plan = tracked.plan
        if plan is not None:
            share = self._computed_share(plan, request.num_tokens)
            report = report._replace(computed_share=share)
            tracked.awaited = plan if plan.counted else None
        tracked.report = report
        self._count(report, recomputed=tracked.awaited is None)
        if plan is not None:
            _note_saved(request, report)

    def computed(self, tracked: TrackedRequest, request: Request, count: int) -> None:
        """The workers computed so many tokens of the awaited plan at all layers."""
        if tracked.report is None or tracked.awaited is None:
            return  # readmitted meanwhile: the report is about the first admission
        plan, tracked.awaited = tracked.awaited, None
        chosen = plan.num_chosen(count)
        recomputed = plan.recomputed(chosen)
        tracked.report = tracked.report._replace(
            recomputed_tokens=recomputed,
            computed_share=self._computed_share(plan, plan.stop + 1, chosen),
        )
        _note_saved(request, tracked.report)
        self._stats.count_tokens("recomputed", recomputed)

    def _computed_share(self, plan: ReusePlan, num_tokens: int, chosen: int | None = None) -> float:
        by_vllm = (num_tokens - plan.stop) * self._num_layers  # the last token, as a rule
        computed = plan.layer_tokens(self._num_layers, chosen) + by_vllm
        return round(computed / ((num_tokens - plan.start) * self._num_layers), 4)

    def _count(self, report: Report, recomputed: bool) -> None:
        self._stats.count_tokens("prefix", report.prefix_tokens)
        self._stats.count_tokens("reused", report.reused_tokens)
        self._stats.count_tokens("exact", report.exact_tokens)
        if recomputed:
            self._stats.count_tokens("recomputed", report.recomputed_tokens)
        self._stats.count_tokens("new", report.new_tokens)
        if report.bypass_reason is None:
            self._stats.count_request("reused")
        else:
            self._stats.count_request("bypassed", report.bypass_reason)


def _note_saved(request: Request, report: Report) -> None:
    """vLLM has noted "everything but the last token"; correct it to what is saved."""
    if request.prefill_stats is not None:
        request.prefill_stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=report.prefix_tokens,
            num_external_cached_tokens=report.reused_tokens - report.recomputed_tokens,
        )
