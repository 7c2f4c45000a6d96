# SPDX-License-Identifier: Apache-2.0
"""What the workers report of plans, told to all whom it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_segreuse.plan import PlanOutcome
from vllm_segreuse.scheduling.errors import Errors
from vllm_segreuse.scheduling.parts import Parts

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Outcomes:
    """One per engine.

    Args:
        parts: of the scheduler's half.
        errors: of hooks end here.
    """

    def __init__(self, parts: Parts, errors: Errors) -> None:
        self._core, self._planner, self._accounts = parts.core, parts.planner, parts.accounts
        self._errors = errors
        self._outcome = parts.features.having("outcome")
        self._carried_out = parts.features.having("carried_out")

    def reported(
        self, outcomes: Mapping[str, PlanOutcome], requests: Mapping[str, Request]
    ) -> None:
        """The workers report how plans have ended; see `SchedulerSide.reported`."""
        for request_id, outcome in outcomes.items():
            if outcome.restoration:
                self._restored(request_id, outcome)
            if request_id in requests:
                with self._errors.cost(requests[request_id], "the outcome of its plan"):
                    self._ended(requests[request_id], outcome)

    def _restored(self, request_id: str, outcome: PlanOutcome) -> None:
        """The workers report a restoration; the request may have another plan by now, or none."""
        with self._core.health.contained("a restoration"):
            tracked, number = self._planner.get(request_id), outcome.restoration
            plan = None if tracked is None else tracked.plan
            still_planned = plan is not None and plan.restores(number)
            if plan is not None and still_planned:
                plan.is_restored = outcome.is_restored
            self._core.pool.restored(number, outcome.is_restored, still_planned)

    def _ended(self, request: Request, outcome: PlanOutcome) -> None:
        """The plan of a request that has not ended was carried out."""
        tracked = self._planner.get(request.request_id)
        if any(it.outcome(request, tracked, outcome) for it in self._outcome) or tracked is None:
            return
        plan = self._accounts.carried_out(tracked, request, outcome)
        if plan is not None:
            for feature in self._carried_out:
                feature.carried_out(request.request_id, plan, outcome)
