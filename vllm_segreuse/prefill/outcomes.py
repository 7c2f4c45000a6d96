# SPDX-License-Identifier: Apache-2.0
"""How plans have ended, as the host reads it off the device, and what it makes them compute next.

fine? ── no ─────────────► all of it, in full
  │ drift > max_drift? ──► all of it, in full
  │ a segment rejected? ─► a second round: the rest of it, and what was computed behind that
  └ done
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from vllm_segreuse.plan import AcceptanceOutcome, PlanOutcome, ReusePlan, second_round
from vllm_segreuse.prefill.batch import Batch

Positions = tuple[int, ...]


class Computed(NamedTuple):
    """A batch whose program has run.

    Attributes:
        active: flat indices of the tokens that all layers were run on.
        finite: bool `[plans]`, whether the hidden states of these tokens are.
    """

    batch: Batch
    active: torch.Tensor
    finite: torch.Tensor


class Ended(NamedTuple):
    """A plan of it, as the host knows it.

    Attributes:
        fine: its scores are numbers, and its hidden states finite.
        computed: tokens that all layers were run on.
        drift: NaN where it is not measured.
        boundary_drifts: of its similar segments, where these are tested.
    """

    plan: ReusePlan
    fine: bool
    computed: int
    drift: float
    boundary_drifts: tuple[float, ...]

    @property
    def is_too_far(self) -> bool:
        """Whether everything is computed because of its drift."""
        return self.fine and self.drift > self.plan.max_drift

    @property
    def wants_positions(self) -> bool:
        """Whether it matters which tokens were computed."""
        if self.plan.explains:
            return True
        check = self.plan.check
        return check is not None and bool(check.is_rejected(self.boundary_drifts).any())

    def outcome(self, positions: Positions | None) -> tuple[PlanOutcome, ReusePlan | None]:
        """What is reported, and what is to be computed yet, as a plan of its own.

        Args:
            positions: of the tokens that were computed, ascending; None: not wanted.
        """
        restoration = self.plan.restoration
        number = 0 if restoration is None else restoration.number
        if not self.fine:
            whole = self.plan.without_copies()
            most = whole.num_tokens - whole.num_fixed
            positions = _everything(whole)
            return PlanOutcome(most, positions=positions, restoration=number), whole
        drift = None if math.isnan(self.drift) else self.drift
        outcome = PlanOutcome(
            self.computed,
            drift,
            self.is_too_far,
            positions,
            restoration=number,
            is_restored=self.plan.num_restored > 0,
        )
        if self.is_too_far:
            return outcome._replace(positions=_everything(self.plan)), self.plan.in_full()
        if self.plan.check is None:
            return outcome, None
        computed = np.isin(np.arange(self.plan.start, self.plan.stop), positions or ())
        second = second_round(self.plan, self.boundary_drifts, computed)
        tested = AcceptanceOutcome(self.boundary_drifts)
        if second is not None:
            either = computed | second.recipe.always
            positions = tuple((np.flatnonzero(either) + self.plan.start).tolist())
            added = int(either.sum() - computed.sum())
            again = second.recipe.counts(0).always
            tested = tested._replace(added=added, again=again)
        return outcome._replace(positions=positions, acceptance=tested), second


def read(computed: list[Computed]) -> list[Ended]:
    """All plans of these batches. The one result of a pass that the host waits for, unless a plan
    explains or rejects."""
    found = [
        figures.double()
        for batch, active, finite in computed
        for figures in (
            (batch.sound & finite),
            batch.num_active(active),
            batch.drift,
            batch.boundary_drifts,
        )
    ]
    numbers = iter(torch.cat(found).tolist() if found else [])
    return [ended for batch, _, _ in computed for ended in _of_batch(batch.plans, numbers)]


def _of_batch(plans: list[ReusePlan], numbers: Iterator[float]) -> list[Ended]:
    fine, active, drift = ([next(numbers) for _ in plans] for _ in range(3))
    return [
        Ended(
            plan,
            bool(fine[i]),
            int(active[i]),
            drift[i],
            tuple(next(numbers) for _ in range(plan.num_tested)),
        )
        for i, plan in enumerate(plans)
    ]


def _everything(plan: ReusePlan) -> Positions | None:
    if not plan.explains:
        return None
    return tuple((np.flatnonzero(~plan.recipe.fixed) + plan.start).tolist())
