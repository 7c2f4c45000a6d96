# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request hold the KV of its own tokens, for the block pool that names them; and
which it takes of an earlier turn."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from vllm_segreuse.cache.exact import restorable
from vllm_segreuse.plan import TO_THE_END
from vllm_segreuse.scheduling.planner import Planner
from vllm_segreuse.scheduling.tracked import NOTHING_LEFT, LeftBehind, TrackedRequest, Use

logger = logging.getLogger("vllm.segreuse")


class ExactNames:
    """What `compat.block_events.Naming` asks.

    Args:
        requests: live requests with extra keys, by id.
        planner: of their plans.
        block_size: tokens per block.
    """

    def __init__(
        self, requests: Mapping[str, TrackedRequest], planner: Planner, block_size: int
    ) -> None:
        self._requests = requests
        self._planner = planner
        self._block_size = block_size

    def exact_ends(self, request_id: str) -> tuple[int, int] | None:
        """As known so far, and once what is restored is in place; None: a request of vLLM's own."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.exact_ends

    def restoration(self, request_id: str) -> int:
        """Number of the restoration of a request's plan; it has one where the two ends differ."""
        plan = self._requests[request_id].plan
        assert plan is not None
        assert plan.restoration is not None
        return plan.restoration.number

    def exact_stop(self, request_id: str) -> int:
        """Behind this position a request takes no exact blocks; see `TrackedRequest`."""
        tracked = self._requests.get(request_id)
        return TO_THE_END if tracked is None else tracked.exact_stop

    def left_behind(self, request_id: str, start: int, stop: int) -> Sequence[int]:
        """Blocks that a request takes behind its prefix hit. An error costs it the reuse."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return ()
        tracked.left_behind = NOTHING_LEFT
        try:
            tracked.left_behind = self._left_behind(tracked, start, stop)
        except Exception:
            logger.exception("segment reuse: request %s takes nothing of earlier turns", request_id)
            self._planner.give_up(request_id)
        return tracked.left_behind.block_ids

    def written_until(self, request_id: str) -> int:
        """Behind the last slot that the pass of a request's plan writes; 0: it has no plan."""
        tracked = self._requests.get(request_id)
        return 0 if tracked is None or tracked.plan is None else tracked.plan.written_until

    def _left_behind(self, tracked: TrackedRequest, start: int, stop: int) -> LeftBehind:
        finders, size = tracked.method.left_behind, self._block_size
        if not finders or not self._planner.reuses or tracked.mode is not Use.REUSE:
            return NOTHING_LEFT
        asked = (find(tracked.prompt, start, stop) for find in finders)  # first: it may say wait
        least = tracked.method.min_reused_tokens  # an equal prompt has passed that, rounded or not
        found = next((it for it in asked if it.behind or it.num_tokens >= least), NOTHING_LEFT)
        next_block = min(stop, start + size)
        if tracked.restores and restorable(tracked.prompt, start, next_block, size).num_tokens:
            return NOTHING_LEFT  # what is exact goes before
        return found

    def allocation_failed(self, request_id: str, blocks: int) -> None:
        """A request that pins donors would wait for these for ever: it gives up as many next."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.plan is not None:
            tracked.allocation_failed = blocks
