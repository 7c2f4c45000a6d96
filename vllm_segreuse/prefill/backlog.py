# SPDX-License-Identifier: Apache-2.0
"""Plans of a worker: small ones before a step's forward, large ones a few waves behind each.

    step n     start: align all of the plan ─► forward ─► waves
    step n+1                                   forward ─► waves
    step n+2                                   forward ─► waves ─► done: vLLM may schedule it

Requests that decode beside a large plan get a token in every step. Donors are read in the first
step only; from then on the plan reads and writes blocks of its own request, which vLLM gives to
nobody else until they are reported as loaded. All ranks hold the same queue and do the same work in
a step, so they report it in the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill import contained
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill
from vllm_segreuse.prefill.waves import Waves, finish


class Backlog:
    """The plans that a worker has taken over.

    Args:
        prefill: carries them out.
        step_work: layer-tokens of spread plans in one step.

    Attributes:
        prefill: as given.
    """

    def __init__(self, prefill: SparsePrefill, step_work: int) -> None:
        self.prefill = prefill
        self._step_work = step_work
        self._under_way: dict[str, Waves[PassReport]] = {}  # in order of arrival

    @property
    def is_empty(self) -> bool:
        """Whether no plan is under way."""
        return not self._under_way

    def take(self, plans: list[ReusePlan]) -> PassReport | None:
        """A step's plans: align all, finish those that are not spread.

        Returns:
            What the finished ones took; None if there were none.
        """
        for plan in plans:
            if plan.spread:
                self._under_way[plan.request_id] = self._waves([plan], self._step_work)
        now = [plan for plan in plans if not plan.spread]
        return finish(self._waves(now)) if now else None

    def _waves(self, plans: list[ReusePlan], wave_work: int | None = None) -> Waves[PassReport]:
        """Align plans, and return what is left to be run."""
        prepared = contained.prepare_or_in_full(self.prefill, plans, wave_work)
        return contained.compute_or_in_full(self.prefill, prepared)

    def advance(self) -> dict[str, PassReport]:
        """A step's share of the spread plans, the oldest first, behind its forward.

        Returns:
            Those that are done, by request.
        """
        with self.prefill.after_forward():
            return self._advance()

    def _advance(self) -> dict[str, PassReport]:
        done: dict[str, PassReport] = {}
        left = self._step_work
        while self._under_way and left > 0:
            request_id, waves = next(iter(self._under_way.items()))
            try:
                left -= next(waves)
            except StopIteration as end:
                del self._under_way[request_id]
                done[request_id] = end.value
        return done

    def drop(self, request_ids: Iterable[str]) -> set[str]:
        """Requests have ended; those of them whose plan was under way, which now is not."""
        dropped = self._under_way.keys() & set(request_ids)
        for request_id in dropped:
            self._under_way.pop(request_id).close()
        return dropped
