# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool with two names per block: the exact one for prefix hits, ours for segments.

Every path by which vLLM names a full block ends in `BlockPool.cache_full_blocks` (vLLM
`v1/core/block_pool.py`), so it is the one place that keeps approximate KV out of the exact cache:
blocks from a plan's start on get a name that no token sequence hashes to. They stay resident and
evictable like any named block (nameless ones would be evicted first), and are never published in KV
events. vLLM offers no hook for this; the connector turns the scheduler's pool into this class.

Obsolete when a connector can say which blocks are exact and be notified of those that are named or
evicted. vllm-project/vllm#44223 proposes to keep approximate KV out of the exact cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

from vllm_segreuse.cache.frozen import FrozenPart, FrozenPool
from vllm_segreuse.cache.planner import Planner, PrefixState
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.cache.tracked import TrackedRequest
from vllm_segreuse.config import MAX_PROVENANCE_DEPTH
from vllm_segreuse.plan import IntArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_segreuse.cache.index import SegmentIndex

logger = init_logger("vllm.segreuse")

_OWN_NAME = b"segreuse:approximate:"


class SegmentBlockPool(BlockPool):
    """A `BlockPool` that feeds the segment index and names approximate blocks apart."""

    index: SegmentIndex
    planner: Planner
    frozen: FrozenPool

    @classmethod
    def adopt(cls, pool: BlockPool) -> SegmentBlockPool:
        """Turn vLLM's pool into one of ours, in place: the manager and its parts all hold it."""
        if type(pool) is not BlockPool:
            raise RuntimeError(
                f"segment reuse needs vLLM's own BlockPool, found {type(pool).__name__}; "
                "another plugin has replaced it"
            )
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool._fresh = set()
        pool._own_names = itertools.count()
        return pool

    def attach(self, index: SegmentIndex, planner: Planner, frozen: FrozenPool) -> None:
        """Index to feed, planner to ask about requests, frozen blocks to give back."""
        self.index = index
        self.planner = planner
        self.frozen = frozen

    # What the planner and the frozen pool need (BlockPins, BlockReferences).

    def pin(self, block_ids: list[int]) -> None:
        """Hold donor blocks; those in the free queue leave it."""
        self.touch([self.blocks[i] for i in block_ids])

    def unpin(self, block_ids: list[int]) -> None:
        """Let donor blocks go; unused ones return to the end of the free queue."""
        self.free_blocks([self.blocks[i] for i in block_ids])

    def references(self, block_id: int) -> int:
        """References on a block, whoever holds them."""
        return int(self.blocks[block_id].ref_cnt)

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, whether or not admission is closed."""
        return int(self.free_block_queue.num_free_blocks)

    def room_beside(self, block_ids: list[int], wanted: int) -> int:
        """Free blocks left if the given blocks were pinned; see `BlockPins`."""
        room = self._room_beside(block_ids)
        while room < wanted and self.make_room(wanted - room + self.num_free_blocks()):
            room = self._room_beside(block_ids)
        return room

    def _room_beside(self, block_ids: list[int]) -> int:
        in_queue = sum(self.blocks[i].ref_cnt == 0 for i in block_ids)
        return self.get_num_free_blocks() - in_queue

    def make_room(self, num_free: int) -> bool:
        """Give frozen blocks back until `num_free` blocks are free.

        Returns:
            Whether blocks became free. If all that are frozen would not do, none is given back:
            the request has to wait for others in any case.
        """
        missing = num_free - self.num_free_blocks()
        if missing <= 0 or missing > self.frozen.num_frozen:
            return False
        with self._contained("giving frozen blocks back"):
            return missing <= self.frozen.num_reclaimable() and self.frozen.make_free(missing) > 0
        return False

    @contextmanager
    def _contained(self, where: str) -> Iterator[None]:
        """An error over what all requests share ends reuse until a reset, never vLLM's engine."""
        try:
            yield
        except Exception:
            self.planner.break_down(where)

    def prefix_state(self, request: Request, num_hit_tokens: int, watermark: int) -> PrefixState:
        """What running `request` behind its prefix hit takes; see `PrefixState`."""
        size = self.hash_block_size
        hit = num_hit_tokens // size
        fresh, idle = False, 0
        for block_hash in request.block_hashes[:hit]:
            found = self.get_cached_block(block_hash, [0])
            if found is not None:
                fresh |= found[0].block_id in self._fresh
                idle += found[0].ref_cnt == 0
        missing = -(-(request.num_tokens + 1) // size) - hit
        return PrefixState(fresh, missing + idle + watermark)

    def resident_blocks(self, request: Request, first: int, last: int) -> IntArray:
        """Blocks `[first, last)` of a request that are cached under its own hashes, else -1.

        Only exact KV has such a name. A block named in this step has no KV yet.
        """
        found = np.full(last - first, -1, np.int32)
        for i, block_hash in enumerate(request.block_hashes[first:last]):
            cached = self.get_cached_block(block_hash, [0])
            if cached is not None and cached[0].block_id not in self._fresh:
                found[i] = cached[0].block_id
        return found

    # What vLLM calls.

    def get_num_free_blocks(self) -> int:
        """Free blocks; none once the planner has closed admission for this step.

        A failed allocation is the one way to end vLLM's loop over the waiting requests early
        (`v1/core/sched/scheduler.py`); answering "wait" to each would cost a prefix lookup each.
        Running requests have been served by then.
        """
        return 0 if self.planner.admission_closed else super().get_num_free_blocks()

    def begin_step(self) -> None:
        """A scheduling step is over: its blocks will hold their KV before a later step reads it."""
        self._fresh.clear()
        with self._contained("giving frozen blocks back"):
            self.frozen.relieve()

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Name full blocks: exact names up to the plan's start, names of our own behind it."""
        if num_cached_blocks >= num_full_blocks:
            return
        tracked = self.planner.get(request.request_id)
        exact_end = num_full_blocks
        if tracked is not None and tracked.plan is not None:
            exact_end = max(
                num_cached_blocks, min(num_full_blocks, tracked.plan.start // block_size)
            )
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            exact_end,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        for block in blocks[exact_end:num_full_blocks]:
            name = BlockHash(_OWN_NAME + next(self._own_names).to_bytes(8, "big"))
            self._insert_block_hash(
                make_block_hash_with_group_id(name, kv_cache_group_id), block, num_tokens=block_size
            )
        if num_full_blocks * block_size > request.num_computed_tokens:
            # Named by a step that is being scheduled, not by the output of one that has left.
            self._fresh.update(b.block_id for b in blocks[num_cached_blocks:num_full_blocks])
        if tracked is not None and tracked.donates and not self.planner.broken:
            try:
                self._index_blocks(tracked, request, blocks, num_cached_blocks, num_full_blocks)
            except Exception:
                logger.exception("segment reuse: request %s donates no more", tracked.request_id)
                tracked.donates = False

    def index_prefix(self, tracked: TrackedRequest, request: Request, block_ids: list[int]) -> None:
        """Let a request's prefix hit donate in its own namespace, whoever computed it."""
        if not tracked.donates or self.planner.broken:
            return
        missing = self.index.missing(tracked.namespace, np.asarray(block_ids, np.int32))
        if len(missing):
            blocks = [self.blocks[i] for i in block_ids]
            # Blocks between them that are known stay as they are.
            self._index_blocks(tracked, request, blocks, int(missing[0]), int(missing[-1]) + 1)

    def _index_blocks(
        self,
        tracked: TrackedRequest,
        request: Request,
        blocks: list[KVCacheBlock],
        first: int,
        last: int,
    ) -> None:
        size = self.hash_block_size
        depths = self.planner.donor_depths(tracked, first, last - first)
        donors = np.flatnonzero((depths >= 0) & (depths <= MAX_PROVENANCE_DEPTH))
        if not len(donors):
            return
        tokens = np.asarray(request.all_token_ids[first * size : last * size], dtype=np.int32)
        # The index takes runs of consecutive blocks; a block that may not donate ends a run.
        for run in np.split(donors, np.flatnonzero(np.diff(donors) > 1) + 1):
            begin, end = int(run[0]), int(run[-1]) + 1
            before = first + begin - 1
            self.index.insert(
                tracked.namespace,
                np.asarray([b.block_id for b in blocks[first + begin : first + end]], np.int32),
                tokens[begin * size : end * size],
                (first + begin) * size,
                parent_block=blocks[before].block_id if before >= 0 else -1,
                depths=depths[begin:end],
            )

    def frozen_part(
        self, tracked: TrackedRequest, first_token: int, block_ids: list[int]
    ) -> FrozenPart:
        """What a request has computed, from the block of `first_token` to its last full block.

        Raises:
            ValueError: it holds no such block, or one that is not exact or not indexed.
        """
        size = self.hash_block_size
        first, last = first_token // size, len(tracked.tokens) // size
        blocks = block_ids[first:last]
        if not blocks:
            raise ValueError(f"no full block holds a token from {first_token} on")
        for block in blocks:
            name = self.blocks[block].block_hash
            if name is None or get_block_hash(name).startswith(_OWN_NAME):
                raise ValueError(f"block {block} is not exact")
        if self.index.missing(tracked.namespace, np.asarray(blocks, np.int32)).size:
            raise ValueError("a block is not indexed")
        middle = (-(-first_token // size) + last - 1) // 2
        window = tracked.tokens[middle * size : (middle + 1) * size]
        probe = None
        if middle * size >= first_token:
            probe = int(window_hashes(np.ascontiguousarray(window), size)[0])
        return FrozenPart(tracked.namespace, blocks, probe)

    def free_blocks(self, ordered_blocks: Any) -> None:
        """A block freed in the step that named it was never computed: it loses its names.

        vLLM itself keeps the exact one: with priorities and `long_prefill_token_threshold` a
        request can be preempted in the step that has scheduled it, and would then resume on it.
        """
        ordered_blocks = list(ordered_blocks)
        if self._fresh:
            for block in ordered_blocks:
                if block.block_id in self._fresh and block.ref_cnt == 1:
                    self._emit_block_removed_events(self._remove_cached_block_hashes(block))
        super().free_blocks(ordered_blocks)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        if not self.planner.broken:
            with self._contained("the removal of a block"):
                self.index.remove(block.block_id)
        removed = super()._remove_cached_block_hashes(block)
        with self._contained("the removal of a frozen block"):
            self.frozen.lost(block.block_id)
        return removed

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        super()._emit_block_removed_events(
            [h for h in block_hashes if not get_block_hash(h).startswith(_OWN_NAME)]
        )

    def reset_prefix_cache(self) -> bool:
        """Forget everything: exact names, segments and what is frozen.

        vLLM refuses while any block is held, so the frozen pool lets go first; unless a request
        holds blocks, too: then vLLM refuses in any case, and nothing is lost.
        """
        with self._contained("a reset of the frozen pool"):
            if self.num_gpu_blocks - 1 == self.num_free_blocks() + self.frozen.num_reclaimable():
                self.frozen.reset()
        done = super().reset_prefix_cache()
        if done:
            self._fresh.clear()
            with self._contained("a reset"):
                self.index.clear()
                self.planner.broken = False
        return done
