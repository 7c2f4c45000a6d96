# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which segments have maps, and which of them a plan reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from segreuse_extras.context.options import SAME, ContextOptions
from segreuse_extras.states import again
from segreuse_extras.states.catalogue import MapCatalogue
from segreuse_extras.states.finder import WholeSegments
from segreuse_extras.states.messages import (
    Captured,
    CaptureOrder,
    MapFacts,
    PlanStates,
    StepStates,
)
from segreuse_extras.states.metrics import EVICTED, NOTED
from segreuse_extras.states.options import StatesServer
from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.plan import BoolArray, Recipe, ReusePlan, Segments
from vllm_segreuse.policies import Situation
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

OTHER_POLICY, OTHER_CONTEXT = "states_need_other_policy", "states_of_other_context"
IMAGES = "multimodal"
"""Reasons for which a request of such a model reuses nothing."""


class SegmentStates(Feature, BlockListener):
    """Of one engine.

    Args:
        core: what features share.
    """

    name = "states"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state_bytes = StatesServer.of(core.config).state_bytes
        self.catalogue = MapCatalogue(lambda count: core.stats.inc(EVICTED, count))
        self.listeners = (self,)
        self._finders: dict[str, WholeSegments] = {}
        self._in_front: dict[str, tuple[int, ...]] = {}
        self._step = StepStates()

    def learned(self, fact: Any) -> None:
        """How many maps there is room for."""
        assert isinstance(fact, MapFacts)
        self.catalogue.capacity = self._state_bytes // fact.map_bytes

    def admit(self, arriving: Arriving) -> None:
        """Let it find whole segments only."""
        tracked = arriving.tracked
        if arriving.images is not None:
            arriving.bypass(IMAGES)
        if arriving.options.policy not in again.POLICIES:
            arriving.bypass(OTHER_POLICY)
        if ContextOptions.of(arriving.options).context == SAME:
            arriving.bypass(OTHER_CONTEXT)  # a map has seen what was in front where it was noted
        space = self._core.namespaces.digest(tracked.prompt.namespace)
        finder = WholeSegments(tracked.method.finder, self.catalogue, space, self._core.block_size)
        tracked.method = replace(tracked.method, finder=finder, later_turns=None, left_behind=())
        if arriving.options.policy == "focus":
            situation = partial(arriving.methods.situation, arriving.options)
            make = partial(_reading_again, finder, situation)
            tracked.method = replace(tracked.method, make_recipe=make, work=None)
        self._finders[tracked.request_id] = finder

    def decided(
        self, request: Request, tracked: TrackedRequest, supplied: int | None
    ) -> int | None:
        """Hold the state in front of its plan, as its donors are held.

        Raises:
            RuntimeError: its plan is not one of whole segments, or has no state in front.
        """
        plan = tracked.plan
        if plan is None or tracked.request_id not in self._finders:
            return supplied
        whole = np.zeros_like(plan.reused)
        for it in self._finders[tracked.request_id].taken:
            whole[it.first - plan.start : it.stop - plan.start] = True
        before = self._before(request, plan)
        is_there = len(before) == (len(self._core.group.states) if plan.start else 0)
        if not is_there or not np.array_equal(plan.reused, whole):
            raise RuntimeError("a plan must reuse whole segments, behind a state that is there")
        self._core.pool.pin(list(before))
        plan.donor_blocks += before
        self._in_front[tracked.request_id] = before
        return supplied

    def _before(self, request: Request, plan: ReusePlan) -> tuple[int, ...]:
        """The block with the state in front of a plan, of each group; none: the prompt begins."""
        if not plan.start:
            return ()
        groups = self._core.group.states
        found = [self._core.pool.state_at(request, plan.start, group) for group in groups]
        return tuple(block.block_id for block in found if block is not None)

    def allocated(self, admitted: Admitted) -> None:
        """Its plan leaves with this step, if it has one; of the rest, maps are noted."""
        tracked, request = admitted.tracked, admitted.request
        finder, plan = self._finders.get(tracked.request_id), tracked.plan
        if finder is None:
            return
        if plan is not None:
            tables = self._core.manager.coordinator.get_blocks(request.request_id)
            running = tuple(tables[group][-1].block_id for group in self._core.group.states)
            segments = tuple(finder.taken)
            for segment in segments:
                self.catalogue.used(segment.segment)
            before = self._in_front[request.request_id]
            self._step.plans[request.request_id] = PlanStates(segments, running, before)
        if tracked.bypass is None:
            self._note(tracked, finder)

    def _note(self, tracked: TrackedRequest, finder: WholeSegments) -> None:
        """Order maps of what is known and computed all the same."""
        kept = {it.segment for plan in self._step.plans.values() for it in plan.segments}
        space = self._core.namespaces.digest(tracked.prompt.namespace)
        for first, stop in finder.missed:
            tokens = tracked.prompt.tokens[first:stop]
            number, dropped = self.catalogue.order(space, tokens, tracked.request_id, kept)
            self._step.dropped += dropped
            if number is not None:
                order = CaptureOrder(number, tracked.request_id, first, stop)
                self._step.orders.append(order)

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> StepStates | None:
        """What the workers need with this step; None: nothing."""
        step, self._step = self._step, StepStates()
        return step if step.plans or step.orders or step.dropped else None

    def reported(self, message: Any) -> None:
        """Maps are there, or cannot be had."""
        assert isinstance(message, Captured)
        for number in message.complete:
            if self.catalogue.complete(number):
                self._core.stats.inc(NOTED)
            else:
                self._step.dropped.append(number)
        for number in message.failed:
            self.catalogue.remove(number)

    def finished(self, ending: Ending) -> None:
        """What it has not given, nobody gives."""
        self._finders.pop(ending.request.request_id, None)
        self._in_front.pop(ending.request.request_id, None)
        self._step.dropped += self.catalogue.abandoned(ending.request.request_id)

    def reset(self) -> None:
        """The prefix cache was reset; perhaps the model has other weights."""
        self._step.dropped += self.catalogue.clear()

    def status(self) -> Mapping[str, Any]:
        """How many maps there are."""
        return {"state_maps": self.catalogue.num_ready}


def _reading_again(
    finder: WholeSegments,
    situation: Callable[[BoolArray, Segments], Situation],
    reused: BoolArray,
    segments: Segments,
) -> Recipe | None:
    return again.recipe(situation(reused, segments), finder.spans)


def start(making: Making) -> SegmentStates | None:
    """That of an engine; None: no layer hands a state on."""
    return SegmentStates(making.core) if making.core.group.states else None
