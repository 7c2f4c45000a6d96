# SPDX-License-Identifier: Apache-2.0
"""The workers' half: what plans need arrives before them, and maps are noted behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from segreuse_extras.states.messages import Captured, MapFacts, StepStates
from vllm_segreuse.engine.kv_group import groups_of_states
from vllm_segreuse.prefill.feature import MakingWorker, WorkerFeature

if TYPE_CHECKING:
    from segreuse_extras.states.prefill import StatesPrefill


class WorkerStates(WorkerFeature):
    """Of one worker.

    Args:
        prefill: carries plans out.
    """

    name = "states"

    def __init__(self, prefill: StatesPrefill) -> None:
        self._prefill = prefill

    def fact(self) -> MapFacts:
        """How large a map is."""
        return MapFacts(self._prefill.state_layers.map_bytes)

    def begin_step(self, message: Any) -> None:
        """Of these, plans of the step read maps that are there: they go first."""
        step = StepStates() if message is None else message
        assert isinstance(step, StepStates)
        self._prefill.given = step.plans
        self._prefill.captures.drop(step.dropped)
        self._prefill.captures.order(step.orders)

    def end_step(self) -> Captured | None:
        """Which maps are there now."""
        return self._prefill.captures.take()

    def close(self) -> None:
        """The engine ends."""
        self._prefill.state_layers.observed_by(None)


def start(making: MakingWorker) -> WorkerStates | None:
    """That of a worker; None: no layer hands a state on."""
    if not groups_of_states(making.kv_cache_config):
        return None
    return WorkerStates(cast("StatesPrefill", making.runtime.prefill))
