# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: decide per request whether its prompt is reused, and from which blocks.

    add ──► decide ──► (vLLM allocates) ──► allocated ──► take_plans ──► workers
              │  0: run without reuse
              └  None: decide in a later step

Work per step is bounded. Once a step's plans fill its compute budget, or many prompts had to be
looked up, admission is closed until the next step, as vLLM's own loop ends when its token budget is
spent: the requests behind keep their order, and none of them is decided on.

A plan pins its donor blocks from `decide` to `take_plans`, that is within one scheduling step:
later steps run behind this one on the same stream, so no donor can be overwritten before it was
read. Records of a second tier are held from `decide` until the workers have read them. Plans whose
allocation failed are dropped by `take_plans`, and made anew at the next decision.

What a plan is made of, and whether it saves work, is `plan_maker.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from vllm_segreuse.cache.exact import end_without_hole, restorable
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.second_tier import NoTier, SecondTier, by_tier, on_rows
from vllm_segreuse.compat.block_events import PrefixState
from vllm_segreuse.plan import Program, ReusePlan
from vllm_segreuse.scheduling.budget import StepBudget
from vllm_segreuse.scheduling.fitting import kept_without
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.plan_maker import FoundPieces, PlanMaker
from vllm_segreuse.scheduling.tracked import Bypass, Report, TrackedRequest, Use


class BlockPins(Protocol):
    """What the planner needs of the block pool."""

    def pin(self, block_ids: list[int]) -> None:
        """Hold blocks: they are not allocated to others while held."""

    def unpin(self, block_ids: list[int]) -> None:
        """Release held blocks."""

    def idle(self, block_ids: Iterable[int]) -> set[int]:
        """Those of the given blocks that nobody holds: each takes a free block if it is pinned."""

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""


class Planner:
    """Makes plans for requests; one per engine.

    Args:
        requests: where those with extra keys are kept, by id, from arrival to end.
        pins: the block pool.
        make_room: frees so many more blocks, if it can; returns whether blocks became free.
        budget: of each step.
        health: where errors over what all requests share end.
        block_size: tokens per block.
        is_spread: whether a plan is to be carried out over several steps.
        clock: seconds.
        on_match: called with the seconds each search took.
        tier: where evicted blocks are stored.
        stages_run: whether pipeline stages run a program; then each plan takes several steps. None:
            one worker has all layers.

    Attributes:
        enabled: kill switch. Off: no request reuses anything.
        observes: all requests are planned, and none of the plans is carried out.
    """

    def __init__(
        self,
        requests: dict[str, TrackedRequest],
        pins: BlockPins,
        make_room: Callable[[int], bool],
        budget: StepBudget,
        health: Health,
        block_size: int,
        is_spread: Callable[[ReusePlan], bool],
        clock: Callable[[], float],
        on_match: Callable[[float], None],
        tier: SecondTier | None = None,
        stages_run: Callable[[Program], bool] | None = None,
    ) -> None:
        self.enabled, self.observes = True, False
        self._requests = requests
        self._pins = pins
        self._make_room = make_room
        self._budget = budget
        self._health = health
        self._block_size = block_size
        self._is_spread = is_spread
        self._clock = clock
        self._on_match = on_match
        self._tier: SecondTier = NoTier() if tier is None else tier
        self._has_stages = stages_run is not None
        self._maker = PlanMaker(stages_run)
        self._pending: dict[str, TrackedRequest] = {}
        self._ready: list[TrackedRequest] = []

    @property
    def reuses(self) -> bool:
        """Whether requests reuse anything now."""
        return self.enabled and not self.observes and not self._health.broken

    @property
    def admission_closed(self) -> bool:
        """Whether no further request may be admitted in this scheduling step."""
        return self._budget.closed

    @property
    def budget(self) -> StepBudget:
        """Of this scheduling step."""
        return self._budget

    @property
    def planned(self) -> set[str]:
        """Requests with a plan of this scheduling step, until `take_plans`."""
        return {*self._pending, *(tracked.request_id for tracked in self._ready)}

    def add(self, tracked: TrackedRequest) -> None:
        """A request with extra keys arrived; its search is prepared outside of `schedule()`."""
        self._requests[tracked.request_id] = tracked
        if tracked.bypass is None:
            tracked.method.finder.prepare(tracked.prompt)

    def get(self, request_id: str) -> TrackedRequest | None:
        """The request, if it has extra keys and has not ended."""
        return self._requests.get(request_id)

    def remove(self, request_id: str) -> TrackedRequest | None:
        """The request ended, in whatever way."""
        self._drop(request_id)
        self._tier.left(request_id)
        return self._requests.pop(request_id, None)

    def give_up(self, request_id: str) -> None:
        """An error occurred over this request: it neither reuses nor donates from here on.

        A plan that vLLM has allocated blocks for is still carried out: they hold nothing otherwise.
        """
        self._drop(request_id)
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.mode, tracked.decision.reason = Bypass("error"), "error"
            tracked.donates_nothing()
            tracked.restores = False

    def leave(self, request_id: str) -> None:
        """Others supply the request from here on: it has no plan, and donates nothing."""
        self._drop(request_id)
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.plan = tracked.observed = None
            tracked.donates_nothing()

    def call_back(self, request_id: str) -> None:
        """The blocks of a request are taken from it: it starts anew, without reuse."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.plan = None
            tracked.mode, tracked.restores = Bypass("reset"), False

    def decide(
        self,
        tracked: TrackedRequest,
        start: int,
        num_tokens: int,
        prefix: Callable[[], PrefixState],
    ) -> int | None:
        """How many tokens behind the prefix hit this request is supplied with.

        Called at every step for every waiting request: cheap unless the request can be planned now.

        Args:
            start: tokens of vLLM's own prefix hit.
            num_tokens: tokens of the request, the last of which vLLM computes itself.
            prefix: looks the prefix hit up; called only if there is something to reuse.

        Returns:
            Tokens up to the plan's end: to the last reused token, to the question, or to the last
            token where the pass has to compute what is before it; 0 to run without reuse, or not at
            all in this step if that closed admission; None to decide in a later step.
        """
        self._drop(tracked.request_id)  # the pins of a plan that was made before
        tracked.plan = tracked.observed = tracked.decision.given_up = None
        tracked.decision.start = start
        stop = num_tokens - 1
        tracked.decision.reason = self._bypass_reason(tracked, stop - start)
        if tracked.decision.reason is not None:
            return 0
        if self._budget.is_spent:
            return self._close()
        found = self._search(tracked, start, stop)
        if found is None:
            return 0
        if (self.observes or tracked.mode is Use.OBSERVE) and not tracked.is_required:
            tracked.observed = self._maker.make(tracked, found, start, stop)
            if tracked.observed is not None:
                tracked.decision.reason = "observed"
            return 0
        state = prefix()
        if state.fresh:
            self._budget.lookups += 1
            return None
        more, tracked.allocation_failed = tracked.allocation_failed, 0
        state = state._replace(blocks_needed=state.blocks_needed + more)
        began = self._clock()
        try:
            return self._admit(tracked, found, start, stop, state)
        finally:
            tracked.decision.planned_s = (began, self._clock())
            if tracked.plan is None:
                self._tier.let_go(tracked.request_id)

    def _search(self, tracked: TrackedRequest, start: int, stop: int) -> FoundPieces | None:
        """What the request's prefix hit can be continued with; None: too little."""
        tracked.decision.found, restored = None, NOTHING
        if tracked.restores:
            last = min(stop, tracked.exact_stop)
            exact = restorable(tracked.prompt, start, last, self._block_size)
            restored = by_tier(exact, self._tier, whole=True)
            self._budget.lookups += exact.num_tokens > 0
        until, others = restored.pieces.stop or start, NOTHING
        if tracked.bypass is None and until < stop:
            matches = self._match(tracked, until, stop)
            others = by_tier(matches, self._tier, whole=tracked.method_in_force.finder.is_exact)
        both = restored.merged(others) if restored.num_tokens else others
        return self._worth_it(tracked, FoundPieces(both, until), start)

    def _worth_it(
        self, tracked: TrackedRequest, found: FoundPieces, start: int
    ) -> FoundPieces | None:
        """As much of it as a plan is made of; None, with the reason noted: it is too little.

        Args:
            start: of what was searched for.
        """
        least = tracked.method_in_force.min_reused_tokens
        is_alone = found.exact_until > start and found.others.num_tokens < least
        if is_alone or tracked.bypass is not None:
            # What is exact stays so: a few tokens are not worth an approximation of the rest.
            found = found.alone()
        tracked.decision.num_segments = found.matches.num_segments
        if found.matches.num_tokens < max(least, 1):
            tracked.decision.reason = tracked.bypass or "too_few_reused_tokens"
            return None
        return found

    def _admit(
        self, tracked: TrackedRequest, found: FoundPieces, start: int, stop: int, state: PrefixState
    ) -> int | None:
        """Make the request's plan, and hold what it reads, if this step has room for both."""
        matches = on_rows(found.matches, self._tier, tracked.request_id)
        if matches is None:
            self._budget.lookups += 1
            return None
        until = end_without_hole(matches.pieces, start, found.exact_until)
        held = self._worth_it(tracked, FoundPieces(matches, until), start)
        if held is None:
            return 0
        plan = self._planned(tracked, held, start, stop)
        if plan is None:
            return 0
        if not self._budget.admits(_at_once(plan)):
            return self._close()
        if self._lacks_room_beside(plan.donor_blocks, state):
            # Never wait for what may not come: without their pins donors themselves make room.
            fewer = self._fitting(tracked, held, start, stop, state)
            plan = None if fewer is None else self._planned(tracked, fewer, start, stop)
            if plan is None:
                tracked.decision.reason = "no_free_blocks"
                return 0
            if not self._budget.admits(_at_once(plan)):
                return self._close()
        self._pins.pin(plan.donor_blocks)
        self._pending[tracked.request_id] = tracked
        self._budget.tokens += _at_once(plan)
        tracked.plan = plan
        return plan.num_supplied

    def allocated(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> Report:
        """vLLM gave the request its block table: it runs in this step, with its plan or without.

        vLLM counts on the plan from here on, so it is handed over before anything can fail.
        """
        if self._pending.pop(tracked.request_id, None) is None:
            tracked.plan = None  # of an earlier admission; an error kept it from being replaced
        plan = tracked.plan
        if plan is not None:
            plan.block_ids = np.asarray(block_ids, dtype=np.int32)
            self._ready.append(tracked)
        else:
            self._tier.left(tracked.request_id)
        start, prompt = tracked.decision.start, tracked.num_tokens
        left = tracked.left_behind.num_tokens
        prefix = start - left
        if plan is None:
            reason = None if left else tracked.decision.reason or "no_match"
            return Report(prefix, left, 0, prompt - start, int(left > 0), reason)
        copied = plan.num_restored + plan.num_reused
        return Report(
            prefix,
            left + copied,
            plan.num_recomputed,
            prompt - start - copied,
            int(left > 0) + tracked.decision.num_segments,
            None,
            exact_tokens=copied if tracked.method_in_force.finder.is_exact else plan.num_restored,
            similar_tokens=plan.pieces.num_similar,
            entering_tokens=plan.num_entering,
            tiered_tokens=plan.copied.num_tiered,
            image_tokens=plan.num_fixed,
        )

    def take_plans(self) -> list[ReusePlan]:
        """End of the scheduling step: the plans to carry out. Nothing stays pinned."""
        plans = [t.plan for t in self._ready if t.plan is not None]
        self._ready = []
        with self._health.contained("the end of a step"):
            for request_id in list(self._pending):
                self._drop(request_id)
            for plan in plans:
                self._pins.unpin(plan.donor_blocks)
            self._tier.sent([plan.request_id for plan in plans])
        self._budget.begin_step()
        return plans

    def _bypass_reason(self, tracked: TrackedRequest, available: int) -> str | None:
        if tracked.bypass is not None and not tracked.restores:
            return tracked.bypass
        if self._health.broken:
            return self._health.reason
        if tracked.is_required:
            return None
        if not self.enabled:
            return "disabled"
        method = tracked.method_in_force
        if available < max(method.min_reused_tokens, method.finder.least_tokens(self._block_size)):
            return tracked.bypass or "too_few_tokens"
        if self.observes or tracked.mode is Use.OBSERVE:
            return tracked.bypass
        return None

    def _close(self) -> int:
        self._budget.close()
        return 0

    def _match(self, tracked: TrackedRequest, start: int, stop: int) -> Matches:
        matches = tracked.method_in_force.finder.remembered(tracked.prompt, start, stop)
        if matches is None:
            began = self._clock()
            matches = tracked.method_in_force.finder.find(tracked.prompt, start, stop)
            ended = self._clock()
            tracked.decision.searched_s = (began, ended)
            self._on_match(ended - began)
            self._budget.lookups += 1
        tracked.decision.found = matches
        return matches

    def _planned(
        self, tracked: TrackedRequest, found: FoundPieces, start: int, stop: int
    ) -> ReusePlan | None:
        plan = self._maker.make(tracked, found, start, stop)
        if plan is not None:
            at_once = tracked.is_required or not self._is_spread(plan)
            plan.spread = self._has_stages or not at_once
        return plan

    def _missing_beside(self, donor_blocks: Iterable[int], state: PrefixState) -> int:
        """Blocks that a request lacks if donors are pinned; 0 or less: it lacks none."""
        pinned = len(self._pins.idle(donor_blocks).difference(state.idle))
        return state.blocks_needed + pinned - self._pins.num_free_blocks()

    def _lacks_room_beside(self, donor_blocks: list[int], state: PrefixState) -> bool:
        """Whether a request lacks blocks if donors are pinned, however many can be made."""
        missing = self._missing_beside(donor_blocks, state)
        while missing > 0 and self._make_room(missing):
            missing = self._missing_beside(donor_blocks, state)
        return missing > 0

    def _fitting(
        self, tracked: TrackedRequest, found: FoundPieces, start: int, stop: int, state: PrefixState
    ) -> FoundPieces | None:
        """As much of what was found as there is room for beside the request; None: too little of
        it, or its plan has to be whole."""
        matches = found.matches
        donors = matches.pieces.donor_blocks
        missing = self._missing_beside(donors, state)
        if tracked.is_required or self._missing_beside((), state) > 0:
            return None
        idle = self._pins.idle(donors).difference(state.idle)
        has_images = tracked.prompt.images is not None
        kept = kept_without(matches.pieces, idle, missing, found.exact_until, has_images)
        part = tracked.method_in_force.finder.part(tracked.prompt, matches, kept, start, stop)
        if part is None:
            return None
        until = end_without_hole(part.pieces, start, found.exact_until)
        tracked.decision.given_up = matches.pieces.where(
            ~np.isin(matches.pieces.destination, part.pieces.destination)
        )
        return self._worth_it(tracked, FoundPieces(part, until), start)

    def _drop(self, request_id: str) -> None:
        """Undo a plan that vLLM has not allocated blocks for."""
        tracked = self._pending.pop(request_id, None)
        if tracked is not None and tracked.plan is not None:
            self._pins.unpin(tracked.plan.donor_blocks)
            self._tier.let_go(request_id)
            self._budget.tokens -= _at_once(tracked.plan)
            tracked.plan = None


def _at_once(plan: ReusePlan) -> int:
    """Tokens that a plan computes in the step that it leaves with."""
    return 0 if plan.spread else plan.active_tokens
