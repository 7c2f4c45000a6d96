# SPDX-License-Identifier: Apache-2.0
"""A plan on one pipeline stage: what of it is computed here, and what the stage says of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segreuse_extras.pipeline.goes import Go
from segreuse_extras.pipeline.link import PlanVerdict
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill import outcomes
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.executor import PassReport
from vllm_segreuse.prefill.outcomes import Computed


@dataclass
class UnderWay:
    """A plan, from when it has left with a step until all stages know how it has ended.

    Attributes:
        batch: laid out and aligned; None: that failed, here or on another tensor-parallel rank.
        report: what it took here so far.
        is_again: whether it is computed in full, because of how it has ended before.
        go: which one it is in.
        before: of the first stage, what an earlier go has computed.
        chunks: of the first stage, what is left to be computed in this one.
        computed: of the first stage, once that is over.
        fine: bool `[]`, of later stages: whether no state was NaN or infinite.
        is_dropped: whether its request has ended.
    """

    plan: ReusePlan
    batch: Batch | None
    report: PassReport
    is_again: bool
    go: Go
    before: Computed | None = None
    chunks: Chunks[Computed] | None = None
    computed: Computed | None = None
    fine: torch.Tensor | None = None
    is_dropped: bool = False

    def in_go(self, go: Go) -> UnderWay:
        """The same plan in its next go."""
        return UnderWay(self.plan, self.batch, self.report, False, go, self.computed)

    # Of the first stage.

    def led(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The verdict and the figures of a go that is over; of the plan, all that was computed."""
        computed, nothing = self.computed, torch.zeros(0, device=device)
        if computed is None:
            failed = torch.tensor(int(PlanVerdict.FAILED), dtype=torch.int32, device=device)
            return failed, nothing
        verdict = _of((computed.batch.sound & computed.finite).all())
        if self.before is not None:
            active = torch.cat([self.before.active, computed.active])
            finite = self.before.finite & computed.finite
            self.computed = Computed(computed.batch, active, finite)
        return verdict, self.go.figures(nothing)

    def note(self, verdict: PlanVerdict, drift: float) -> None:
        """Report how the plan has ended, as the stage knows that has computed its tokens first."""
        plan, request_id = self.plan, self.plan.request_id
        positions = None
        if self.computed is None:
            ended = outcomes.Ended(plan, False, 0, float("nan"), ())
        else:
            [ended] = outcomes.read([self.computed])
            ended = ended._replace(drift=drift)
            batch, active, _ = self.computed
            wanted = [request_id] if ended.wants_positions else []
            positions = batch.positions(active, wanted).get(request_id)
        outcome, _ = ended._replace(fine=verdict is PlanVerdict.FINE).outcome(positions)
        if verdict is PlanVerdict.NOT_FINITE:
            self.report.not_finite.append(request_id)
        if plan.reports or verdict is not PlanVerdict.FINE:
            shown = outcome if plan.explains else outcome._replace(positions=None)
            self.report.outcomes[request_id] = shown

    # Of later stages.

    def followed(self, fine: torch.Tensor) -> None:
        """A chunk was computed here.

        Args:
            fine: bool `[]`, whether its states are finite.
        """
        self.fine = fine if self.fine is None else self.fine & fine

    def told(self, so_far: torch.Tensor, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The figures of a go with this stage's, and what the last one answers.

        Args:
            so_far: of the stages before.
        """
        if self.batch is None:
            return so_far, so_far.new_zeros(self.go.answer_numbers, dtype=torch.float64)
        figures = self.go.figures(so_far)
        return figures, self.go.answer(figures) if is_last else figures

    def with_own(self, verdict: torch.Tensor) -> torch.Tensor:
        """The verdict of the stages before, and this one's; once `told` was asked, which chooses.

        Args:
            verdict: int32 `[]`.
        """
        if self.batch is None:
            return torch.zeros_like(verdict)  # FAILED
        verdict = verdict.minimum(_of(self.batch.sound.all()))
        return verdict if self.fine is None else verdict.minimum(_of(self.fine))


def _of(fine: torch.Tensor) -> torch.Tensor:
    """int32 `[]`, a `PlanVerdict`, of a bool."""
    return fine.to(torch.int32) + PlanVerdict.NOT_FINITE
