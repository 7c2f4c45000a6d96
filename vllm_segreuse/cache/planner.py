# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: decide per request whether its prompt is reused, and from which blocks.

    add ──► decide ──► (vLLM allocates) ──► allocated ──► take_plans ──► workers
              │  0: run without reuse
              └  None: ask again in a later step

Work per step is bounded. Once a step's plans fill its compute budget, or many requests had to be
looked at, admission is closed until the next step, as vLLM's own loop ends when its token budget is
spent: the requests behind keep their order and are not even asked.

A plan pins its donor blocks from `decide` to `take_plans`, that is within one scheduling step:
later steps run behind this one on the same stream, so no donor can be overwritten before it was
read. Plans whose allocation failed are dropped by `take_plans` and made anew when vLLM asks again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vllm_segreuse.cache.exact import resident_matches
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches, find_matches
from vllm_segreuse.cache.tracked import Memo, Report, TrackedRequest
from vllm_segreuse.plan import IntArray, ReusePlan, reused_mask, segment_starts

logger = logging.getLogger("vllm.segreuse")

_LOOKUPS_PER_STEP = 16  # at about 0.5 ms each for a long prompt


class BlockPins(Protocol):
    """What the planner needs of the block pool."""

    def pin(self, block_ids: list[int]) -> None:
        """Hold blocks: they are not given to anybody else while held."""

    def unpin(self, block_ids: list[int]) -> None:
        """Let held blocks go."""

    def room_beside(self, block_ids: list[int], wanted: int) -> int:
        """Free blocks that would be left if the given blocks were pinned.

        Should they be fewer than `wanted`, the pool may first give up what it can do without.
        """


class PrefixState(NamedTuple):
    """vLLM's own prefix hit of a request.

    Attributes:
        fresh: a block of it was hashed in this very step, so its KV is not there yet.
        blocks_needed: blocks vLLM must still take from the free queue to run the request.
    """

    fresh: bool
    blocks_needed: int


class Planner:
    """Makes plans for requests; one per engine.

    Args:
        index: the virtual blocks.
        pins: the block pool.
        max_step_tokens: most tokens all plans of one step may compute (a single larger plan is
            admitted alone and runs in several waves).
        is_spread: whether a plan is to be carried out over several steps.
        max_depth: deepest provenance that may donate.
        on_match: called with the seconds each match took.
    """

    def __init__(
        self,
        index: SegmentIndex,
        pins: BlockPins,
        max_step_tokens: int,
        is_spread: Callable[[ReusePlan], bool],
        max_depth: int,
        clock: Callable[[], float],
        on_match: Callable[[float], None],
    ) -> None:
        self.enabled = True
        self.broken = False
        self._index = index
        self._pins = pins
        self._max_step_tokens = max_step_tokens
        self._is_spread = is_spread
        self._max_depth = max_depth
        self._clock = clock
        self._on_match = on_match
        self._requests: dict[str, TrackedRequest] = {}
        self._pending: dict[str, TrackedRequest] = {}
        self._ready: list[TrackedRequest] = []
        self._step_tokens = 0
        self._step_lookups = 0
        self._closed = False

    @property
    def admission_closed(self) -> bool:
        """Whether no further request may be admitted in this scheduling step."""
        return self._closed

    def add(self, tracked: TrackedRequest) -> None:
        """A request with extra keys arrived; its prompt is hashed outside the scheduling loop."""
        self._requests[tracked.request_id] = tracked
        if tracked.bypass is None and tracked.resident_blocks is None:
            tracked.hashes(self._index.block_size)

    def get(self, request_id: str) -> TrackedRequest | None:
        """The request, if it has extra keys and has not ended."""
        return self._requests.get(request_id)

    def remove(self, request_id: str) -> TrackedRequest | None:
        """The request ended, in whatever way."""
        self._drop(request_id)
        return self._requests.pop(request_id, None)

    def give_up(self, request_id: str) -> None:
        """An error occurred over this request: it neither reuses nor donates from here on.

        A plan that vLLM has allocated blocks for is still carried out: they hold nothing otherwise.
        """
        self._drop(request_id)
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.bypass = tracked.reason = "error"
            tracked.donates = False

    def call_back(self, request_id: str) -> None:
        """The blocks of a request are taken from it: it starts anew, without reuse."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.plan = tracked.awaited = None
            tracked.bypass = "reset"

    def break_down(self, where: str) -> None:
        """An error occurred over what all requests share; call it where the error is handled.

        Nothing is reused until everything was forgotten. Plans that vLLM has allocated blocks for
        are still carried out.
        """
        self.broken = True
        logger.exception(
            "segment reuse failed in %s, and is off until the prefix cache is reset", where
        )

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
            `num_tokens - 1 - start`, or up to the end of the last resident block in the exact tier;
            one more where a spread plan computes the last token, whose slot it then needs; 0 to run
            without reuse, or not at all in this step if that closed admission; None to be asked
            again in a later step.
        """
        self._drop(tracked.request_id)
        tracked.plan, tracked.start = None, start
        stop = num_tokens - 1
        tracked.reason = self._bypass_reason(tracked, stop - start)
        if tracked.reason is not None:
            return 0
        full = self._step_tokens >= self._max_step_tokens
        if self._closed or full or self._step_lookups >= _LOOKUPS_PER_STEP:
            return self._close()
        matches = self._match(tracked, start, stop)
        tracked.num_segments = matches.num_segments
        if matches.num_tokens < tracked.min_reused_tokens:
            tracked.reason = "too_few_reused_tokens"
            return 0
        state = prefix()
        if state.fresh:
            self._step_lookups += 1
            return None
        plan = self._make_plan(tracked, matches, start, stop)
        plan.spread = self._is_spread(plan)
        if self._step_tokens and self._step_tokens + _at_once(plan) > self._max_step_tokens:
            return self._close()
        room = self._pins.room_beside(plan.donor_blocks, state.blocks_needed)
        if room < state.blocks_needed:
            # Without the pins the donors themselves may make room: never wait for what may not
            # come.
            tracked.reason = "no_free_blocks"
            return 0
        self._pins.pin(plan.donor_blocks)
        self._pending[tracked.request_id] = tracked
        self._step_tokens += _at_once(plan)
        tracked.plan = plan
        return plan.num_written if plan.spread else plan.num_tokens

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
        start, prompt = tracked.start, len(tracked.tokens)
        if plan is None:
            return Report(start, 0, 0, prompt - start, 0, tracked.reason or "no_match")
        return Report(
            start,
            plan.num_reused,
            plan.num_recomputed,
            prompt - start - plan.num_reused,
            tracked.num_segments,
            None,
            exact_tokens=plan.num_reused if tracked.resident_blocks is not None else 0,
        )

    def take_plans(self) -> list[ReusePlan]:
        """End of the scheduling step: the plans to carry out. Nothing stays pinned."""
        plans = [t.plan for t in self._ready if t.plan is not None]
        self._ready, self._closed = [], False
        try:
            self._end_step(plans)
        except Exception:
            self.break_down("the end of a step")
        return plans

    def _end_step(self, plans: list[ReusePlan]) -> None:
        for request_id in list(self._pending):
            self._drop(request_id)
        for plan in plans:
            self._pins.unpin(plan.donor_blocks)
        self._step_tokens = self._step_lookups = 0
        self._index.begin_step()

    def donor_depths(self, tracked: TrackedRequest, first_block: int, count: int) -> IntArray:
        """Provenance depth of consecutive blocks of a request; -1 where a block may not donate.

        Exact blocks have depth 0. Behind a plan's start a block donates if every token of it was
        computed at every layer, one deeper than the deepest donor of the plan.
        """
        plan = tracked.plan
        if plan is None:
            return np.zeros(count, dtype=np.int32)
        size = self._index.block_size
        first = first_block * size
        computed = np.ones(count * size, dtype=np.bool_)
        low, high = max(plan.start - first, 0), min(plan.stop - first, count * size)
        if plan.spread:
            # The token behind the plan is vLLM's to compute, in a step after the one that names it.
            behind = max(plan.start + plan.num_written - first, 0)
            computed[max(plan.stop - first, 0) : behind] = False
        if low < high:
            computed[low:high] = plan.recipe.settled[low + first - plan.start :][: high - low]
        depth = plan.donor_depth + 1
        whole = computed.reshape(count, size).all(axis=1)
        depths = np.where(whole & (depth <= self._max_depth), depth, -1)
        exact = np.arange(first_block, first_block + count) < plan.start // size
        return np.where(exact, 0, depths).astype(np.int32)

    def _bypass_reason(self, tracked: TrackedRequest, available: int) -> str | None:
        if tracked.bypass is not None:
            return tracked.bypass
        if self.broken:
            return "error"
        if not self.enabled:
            return "disabled"
        if available < max(tracked.min_reused_tokens, self._index.block_size):
            return "too_few_tokens"
        return None

    def _close(self) -> int:
        self._closed = True
        return 0

    def _match(self, tracked: TrackedRequest, start: int, stop: int) -> Matches:
        if tracked.resident_blocks is not None:
            return self._match_resident(tracked.resident_blocks, start, stop)
        key = (start, stop, self._index.version)
        if tracked.memo is None or tracked.memo.key != key:
            began = self._clock()
            hashes = tracked.hashes(self._index.block_size)
            matches = find_matches(
                self._index, tracked.namespace, tracked.tokens, hashes, start, stop, self._max_depth
            )
            self._on_match(self._clock() - began)
            self._step_lookups += 1
            tracked.memo = Memo(key, matches)
        return tracked.memo.matches

    def _match_resident(
        self, resident_blocks: Callable[[int, int], IntArray], start: int, stop: int
    ) -> Matches:
        """Not kept for the next step: it is as quick as vLLM's own lookup of the prefix."""
        began = self._clock()
        size = self._index.block_size
        first = -(-start // size)
        blocks = resident_blocks(first, max(first, stop // size))
        self._on_match(self._clock() - began)
        self._step_lookups += 1
        return resident_matches(blocks, first, size)

    @staticmethod
    def _make_plan(tracked: TrackedRequest, matches: Matches, start: int, stop: int) -> ReusePlan:
        if tracked.resident_blocks is not None:
            # What follows is vLLM's own work, as behind a prefix hit that ends here.
            stop = int(matches.pieces[-1, :2].sum())
        recipe = tracked.make_recipe(
            reused_mask(matches.pieces, start, stop), segment_starts(matches.pieces, start)
        )
        return ReusePlan(
            request_id=tracked.request_id,
            start=start,
            stop=stop,
            token_ids=tracked.tokens[start:stop],
            pieces=matches.pieces,
            recipe=recipe,
            donor_blocks=np.unique(matches.pieces[:, 2]).tolist(),
            donor_depth=matches.max_depth,
            next_token=int(tracked.tokens[stop]) if recipe.program.probes_next_token else None,
            counted=recipe.program.may_choose_fewer,
        )

    def _drop(self, request_id: str) -> None:
        """Undo a plan that vLLM has not allocated blocks for."""
        tracked = self._pending.pop(request_id, None)
        if tracked is not None and tracked.plan is not None:
            self._pins.unpin(tracked.plan.donor_blocks)
            self._step_tokens -= _at_once(tracked.plan)
            tracked.plan = None


def _at_once(plan: ReusePlan) -> int:
    """Tokens that a plan computes in the step that it leaves with."""
    return 0 if plan.spread else plan.active_tokens
