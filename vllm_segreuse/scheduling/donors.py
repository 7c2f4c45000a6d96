# SPDX-License-Identifier: Apache-2.0
"""Which blocks donate: the segment index is fed from what vLLM names, and forgets what it evicts.

request     | prefix hit | computed | reused | computed | answer ...      one with a plan
donates           yes        yes        no       yes         yes
depth              0          1                   1           1           above its donors' 0

request     | context    | document | filler                               of a knowledge base
donates           no         yes        yes

What a document is computed behind has less before it than where it is a document itself, and would
be a worse donor of the same text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vllm_segreuse.cache.index import BlockFacts, SegmentIndex
from vllm_segreuse.compat.block_events import BlockListener, NamedBlocks
from vllm_segreuse.options.server import MAX_PROVENANCE_DEPTH
from vllm_segreuse.plan import BoolArray, IntArray, ReusePlan
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.tracked import TrackedRequest

logger = logging.getLogger("vllm.segreuse")


class Follower:
    """Keeps something of what donates, by block. It overrides what it needs."""

    def inserted(self, namespace: int, block_ids: IntArray) -> None:
        """Consecutive blocks of a sequence were indexed; called within `schedule()`."""

    def too_deep(self, namespace: int, tokens: IntArray) -> None:
        """Blocks were computed behind reused KV of the largest depth, and do not donate.

        Args:
            tokens: int32 `[blocks, block_size]`.
        """

    def removed(self, block_ids: Sequence[int]) -> None:
        """Blocks were evicted, and are about to be removed from the index."""

    def cleared(self) -> None:
        """All blocks were."""


class Donors(BlockListener):
    """One per engine.

    Args:
        index: what donates.
        requests: live requests with extra keys, by id.
        max_depth: deepest provenance that may donate.
        health: where errors over the index end.
        followers: are notified of what donates, and of what does no more.
        are_whole: bool of each of some blocks, whether all layers still have what it stands for;
            None: they do.
    """

    def __init__(
        self,
        index: SegmentIndex,
        requests: Mapping[str, TrackedRequest],
        max_depth: int,
        health: Health,
        followers: Sequence[Follower] = (),
        are_whole: Callable[[Sequence[int]], BoolArray] | None = None,
    ) -> None:
        self._are_whole = are_whole
        self._index = index
        self._requests = requests
        self._max_depth = max_depth
        self._health = health
        self._followers = followers

    def named(self, blocks: NamedBlocks) -> None:
        """Index those of them that may donate. An error ends the donations of their request."""
        tracked = self._requests.get(blocks.request_id)
        if tracked is None or not self._may_donate(tracked):
            return
        try:
            self._insert(tracked, blocks)
        except Exception:
            logger.exception("segment reuse: request %s donates no more", tracked.request_id)
            tracked.donates_nothing()

    def evicted(self, block_ids: Sequence[int]) -> None:
        """Forget blocks."""
        if not self._health.broken:
            with self._health.contained("the removal of blocks"):
                for follower in self._followers:
                    follower.removed(block_ids)
                self._index.remove(block_ids)

    def reset(self) -> None:
        """Forget all blocks, and any error with them."""
        with self._health.contained("a reset"):
            self._index.clear()
            for follower in self._followers:
                follower.cleared()
            self._health.recover()

    def begin_step(self) -> None:
        """A scheduling step is over: what it named may donate from the next on."""
        with self._health.contained("the end of a step"):
            self._index.begin_step()

    def index_prefix(
        self, tracked: TrackedRequest, token_ids: Sequence[int], block_ids: list[int]
    ) -> None:
        """Let a request's prefix hit donate in its own namespace, whoever computed it.

        Args:
            token_ids: all tokens of the request.
            block_ids: of the hit, in order.
        """
        if not self._may_donate(tracked):
            return
        missing = self._index.missing(tracked.prompt.namespace, np.asarray(block_ids, np.int32))
        if not len(missing):
            return
        # Blocks between them that are known stay as they are.
        first, last = int(missing[0]), int(missing[-1]) + 1
        parent = block_ids[first - 1] if first else -1
        found = NamedBlocks(tracked.request_id, first, block_ids[first:last], parent, token_ids)
        self._insert(tracked, found)

    def depths(self, tracked: TrackedRequest, first_block: int, count: int) -> IntArray:
        """Provenance depth of consecutive blocks of a request; -1 where a block may not donate.

        Exact blocks have depth 0. Behind them a block donates if every token of it was computed at
        every layer, one deeper than what the request reads (`TrackedRequest.donor_depth`). Blocks
        in front of `donates_from` do not donate.
        """
        size = self._index.block_size
        numbers = np.arange(first_block, first_block + count)
        depth = tracked.donor_depth + 1
        if not depth:
            depths = np.zeros(count, np.int32)
        else:
            whole = self._computed_whole(tracked.plan, first_block, count)
            depths = np.where(whole & (depth <= self._max_depth), depth, -1)
            depths = np.where(numbers < tracked.exact_until // size, 0, depths)
        if tracked.donates_from:
            depths = np.where(numbers < tracked.donates_from // size, -1, depths)
        return depths.astype(np.int32)

    def _computed_whole(self, plan: ReusePlan | None, first_block: int, count: int) -> BoolArray:
        """bool `[count]`: of which consecutive blocks every token is computed at every layer."""
        size = self._index.block_size
        first = first_block * size
        if plan is None:
            return np.ones(count, np.bool_)
        computed = np.ones(count * size, dtype=np.bool_)
        low, high = max(plan.start - first, 0), min(plan.stop - first, count * size)
        if low < high:
            computed[low:high] = plan.recipe.settled[low + first - plan.start :][: high - low]
        return np.asarray(computed.reshape(count, size).all(axis=1), np.bool_)

    def _may_donate(self, tracked: TrackedRequest) -> bool:
        return tracked.donates and not self._health.broken

    def _insert(self, tracked: TrackedRequest, blocks: NamedBlocks) -> None:
        size, first = self._index.block_size, blocks.first
        depths = self.depths(tracked, first, len(blocks.block_ids))
        if self._are_whole is not None:
            depths = np.where(self._are_whole(blocks.block_ids), depths, -1).astype(np.int32)
        if not depths.any():  # as nearly always: all of them are exact
            self._index_run(tracked, blocks, slice(0, len(depths)), 0)
            return
        donors = np.flatnonzero((depths >= 0) & (depths <= MAX_PROVENANCE_DEPTH))
        if tracked.donor_depth >= self._max_depth:
            last = first + len(depths)
            tokens = _tokens(tracked, blocks, first * size, last * size)
            others = (depths < 0) & self._computed_whole(tracked.plan, first, len(depths))
            for follower in self._followers:
                follower.too_deep(tracked.prompt.namespace, tokens.reshape(-1, size)[others])
        if not len(donors):
            return
        # The index takes runs of consecutive blocks; a block that may not donate ends a run.
        for run in np.split(donors, np.flatnonzero(np.diff(donors) > 1) + 1):
            part = slice(int(run[0]), int(run[-1]) + 1)
            self._index_run(tracked, blocks, part, depths[part])

    def _index_run(
        self, tracked: TrackedRequest, blocks: NamedBlocks, run: slice, depths: int | IntArray
    ) -> None:
        """Consecutive ones of the blocks donate from now on."""
        size, first = self._index.block_size, blocks.first + run.start
        last = blocks.first + run.stop
        block_ids = np.asarray(blocks.block_ids[run], np.int32)
        images = tracked.prompt.images
        self._index.insert(
            tracked.prompt.namespace,
            block_ids,
            _tokens(tracked, blocks, first * size, last * size),
            first * size,
            parent_block=blocks.block_ids[run.start - 1] if run.start else blocks.parent,
            depths=depths,
            facts=BlockFacts(
                contexts=tracked.prompt.contexts(np.arange(first, last, dtype=np.int32)),
                position_offsets=None
                if images is None
                else images.position_offsets(first * size, last * size),
            ),
        )
        # Their tokens would mean nothing to those who compare text.
        for follower in self._followers if images is None else ():
            follower.inserted(tracked.prompt.namespace, block_ids)


def _tokens(tracked: TrackedRequest, blocks: NamedBlocks, start: int, stop: int) -> IntArray:
    """int32 `[stop - start]`, tokens of the request; those of images have ids of their own."""
    tokens = np.asarray(blocks.token_ids[start:stop], np.int32)
    images = tracked.prompt.images
    return tokens if images is None else images.keyed(tokens, start)
