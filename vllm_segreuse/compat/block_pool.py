# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool with two names per block: the exact one for prefix hits, ours for segments.

Every path by which vLLM names a full block ends in `BlockPool.cache_full_blocks` (vLLM
`v1/core/block_pool.py`), so it is the one place that keeps approximate KV out of the exact cache:
blocks from a plan's start on get a name that no token sequence hashes to. They stay resident and
evictable like any named block (nameless ones would be evicted first), and are never published in KV
events. vLLM offers no hook for this; the connector turns the scheduler's pool into this class.

What is done with named, evicted and forgotten blocks is decided by the pool's listeners
(`block_events.py`).

Obsolete when a connector can say which blocks are exact and be notified of those that are named or
evicted. vllm-project/vllm#44223 proposes to keep approximate KV out of the exact cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

from vllm_segreuse.compat.block_events import (
    AdmissionState,
    BlockListener,
    NamedBlocks,
    Naming,
    PrefixState,
    SiblingBlocks,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.request import Request

_OWN_NAME = b"segreuse:approximate:"
_BLOCKS_OF_STATES = 2
"""Most that a request takes in a step and group: behind what is supplied, and behind the rest."""


class Group(Protocol):
    """The KV cache group whose blocks are reused."""

    @property
    def index(self) -> int:
        """In vLLM's lists by group."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def others(self) -> tuple[int, ...]:
        """Groups whose blocks hold the same tokens for other layers."""

    @property
    def states(self) -> tuple[int, ...]:
        """Groups whose blocks hold a state each."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each of them, tokens that vLLM keeps blocks for; None: for all."""

    def of(self, by_group: Sequence[Any]) -> Any:
        """The group's own entry of a list that vLLM keeps by group."""

    def of_others(self, by_group: Sequence[Any]) -> list[Any]:
        """The others' entries."""


class _Awaited(NamedTuple):
    """Blocks of a request that get exact names if a restoration is in place: its last ones.

    Attributes:
        blocks: of the request, from its first one on.
        first: index of the first one that is meant.
        names: of these meanwhile.
    """

    request: Request
    blocks: list[KVCacheBlock]
    first: int
    names: list[BlockHashWithGroupId]


class SegmentBlockPool(BlockPool):
    """A `BlockPool` that names approximate blocks apart, and reports what becomes of its blocks.

    Attributes:
        group: whose blocks these are.
        make_room: frees so many more blocks, if it can; returns whether blocks became free.
        siblings: what blocks of other groups hold beside those of `group`; None: there are none.
        window_end: while an allocation is under way, where vLLM's windows end at the latest: what a
            plan supplies behind it needs blocks also where no window reaches; None: anywhere.
    """

    group: Group
    siblings: SiblingBlocks | None
    window_end: int | None
    _blocks_of: Callable[[str], Sequence[Sequence[KVCacheBlock]]]
    _pinned: dict[int, list[list[int]]]
    make_room: Callable[[int], bool]
    _naming: Naming
    _admission: AdmissionState
    _listeners: Sequence[BlockListener]
    _keeps_evicted: bool
    _awaited: dict[int, list[_Awaited]]
    _evicted: list[int] | None  # of the allocation under way

    @classmethod
    def adopt(
        cls,
        pool: BlockPool,
        group: Group,
        siblings: SiblingBlocks | None = None,
        blocks_of: Callable[[str], Sequence[Sequence[KVCacheBlock]]] = lambda request_id: (),
    ) -> SegmentBlockPool:
        """Turn vLLM's pool into one of ours, in place: the manager and its parts all hold it.

        Args:
            siblings: remembers which blocks of several groups hold the same tokens; None: there
                is one group.
            blocks_of: a request's blocks in each group.
        """
        if type(pool) is not BlockPool:
            raise RuntimeError(
                f"segment reuse needs vLLM's own BlockPool, found {type(pool).__name__}; "
                "another plugin has replaced it"
            )
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.group = group
        pool._fresh = set()
        pool._own_names = itertools.count()
        pool._awaited = {}
        pool._evicted = None
        pool.siblings, pool._blocks_of = siblings, blocks_of
        pool.window_end, pool._pinned = None, {}
        return pool

    def attach(
        self,
        naming: Naming,
        admission: AdmissionState,
        make_room: Callable[[int], bool],
        listeners: Sequence[BlockListener],
        keeps_evicted: bool = False,
    ) -> None:
        """Connect it; nothing is allocated before.

        Args:
            naming: of the requests that reuse.
            admission: of the scheduling step.
            make_room: see there.
            listeners: in the order in which they are called.
            keeps_evicted: whether any of them wants to know what is about to be evicted.
        """
        self._naming = naming
        self._admission = admission
        self.make_room = make_room
        self._listeners = listeners
        self._keeps_evicted = keeps_evicted

    @property
    def fresh(self) -> frozenset[int]:
        """Blocks that were named in this scheduling step: their KV is not there yet."""
        return frozenset(self._fresh)

    @property
    def awaited(self) -> frozenset[int]:
        """Numbers of the restorations whose blocks wait for their exact names."""
        return frozenset(self._awaited)

    def listen(self, listener: BlockListener) -> None:
        """Report to one more listener, behind the others."""
        self._listeners = (*self._listeners, listener)

    # What plans and frozen entries need.

    def pin(self, block_ids: list[int]) -> None:
        """Hold donor blocks, with their siblings; those in the free queue leave it."""
        if self.siblings is not None:
            for block_id in block_ids:
                others = self.siblings.all_of([block_id])
                self._pinned.setdefault(block_id, []).append(others)
                self.touch([self.blocks[i] for i in others])
        self.touch([self.blocks[i] for i in block_ids])

    def unpin(self, block_ids: list[int]) -> None:
        """Release donor blocks; unused ones return to the end of the free queue."""
        if self.siblings is not None:
            others = [i for block_id in block_ids for i in self._unpinned(block_id)]
            self.free_blocks([self.blocks[i] for i in others])
        self.free_blocks([self.blocks[i] for i in block_ids])

    def _unpinned(self, block_id: int) -> list[int]:
        """What was pinned with a block, whatever has become of it since."""
        pinned = self._pinned[block_id]
        others = pinned.pop()
        if not pinned:
            del self._pinned[block_id]
        return others

    @property
    def pinned(self) -> list[int]:
        """Blocks that are held with their siblings."""
        return [*self._pinned]

    def references(self, block_id: int) -> int:
        """References on a block, whoever holds them."""
        return int(self.blocks[block_id].ref_cnt)

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, whether or not admission is closed."""
        return int(self.free_block_queue.num_free_blocks)

    def idle(self, block_ids: Iterable[int]) -> set[int]:
        """Those of the given blocks, and of their siblings, that nobody holds: they are free until
        they are pinned."""
        wanted = [*block_ids]
        if self.siblings is not None:
            wanted += self.siblings.all_of(wanted)
        return {i for i in wanted if self.blocks[i].ref_cnt == 0}

    def are_whole(self, block_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool `[blocks]`: of which blocks all groups still have what they hold of these tokens."""
        if self.siblings is None:
            return np.ones(len(block_ids), np.bool_)
        return self.siblings.are_whole(block_ids)

    def exact_stop(self, request_id: str) -> int:
        """Behind this position a request takes no exact blocks; see `Naming`."""
        return self._naming.exact_stop(request_id)

    def left_behind(self, request_id: str, start: int, stop: int) -> list[KVCacheBlock]:
        """Blocks that a request takes behind its prefix hit; see `Naming`. None where there are
        several groups: whoever left them has lost those of windows, and its states."""
        if self.siblings is not None or self.group.states:
            return []
        found = self._naming.left_behind(request_id, start, stop)
        return [self.blocks[block_id] for block_id in found]

    def written_until(self, request_id: str) -> int:
        """Tokens of a request that need slots, whoever computes them; see `Naming`."""
        return self._naming.written_until(request_id)

    def allocation_failed(self, request_id: str, blocks: int) -> bool:
        """A request was not allocated, for want of so many blocks, although no other holds any.
        Listeners release what they hold for others. Else, if its plan pins donors, it would wait
        for these for ever: it gives up as many next.

        Returns:
            Whether blocks became free.
        """
        before = self.num_free_blocks()
        for listener in self._listeners:
            listener.starving(request_id)
        if self.num_free_blocks() > before:
            return True
        self._naming.allocation_failed(request_id, blocks)
        return False

    def is_exact(self, block_id: int) -> bool:
        """Whether a block has an exact name."""
        named = self.name_of(block_id)
        return named is not None and named[1]

    def name_of(self, block_id: int) -> tuple[bytes, bool] | None:
        """vLLM's name of a block, with its group, and whether it is an exact one."""
        name = self.blocks[block_id].block_hash
        return None if name is None else (name, not get_block_hash(name).startswith(_OWN_NAME))

    def prefix_state(
        self,
        request: Request,
        num_hit_tokens: int,
        num_slots: int,
        watermark: int,
        left_behind: Sequence[int] = (),
    ) -> PrefixState:
        """What running `request` behind its prefix hit takes; see `PrefixState`.

        Args:
            num_hit_tokens: of the prefix hit, with what is taken behind it.
            num_slots: that vLLM takes for all of the request (`KvSlots`).
            watermark: blocks that vLLM keeps free.
            left_behind: the last blocks of the hit, which are not exact.
        """
        size = self.group.block_size
        hit = num_hit_tokens // size
        exact = request.block_hashes[: hit - len(left_behind)]
        found = [self._cached(block_hash) for block_hash in exact]
        blocks = [*(block.block_id for block in found if block is not None), *left_behind]
        fresh = not self._fresh.isdisjoint(blocks)
        idle = self._unheld(self.blocks[block] for block in blocks)
        missing = -(-num_slots // size) - hit
        for index, window in zip(self.group.others, self.group.windows, strict=True):
            first = 0 if window is None else max(0, num_hit_tokens - window + 1) // size
            held = [self.get_cached_block(it, [index]) for it in exact[first:]]
            idle |= self._unheld([it[0] for it in held if it is not None])
            missing += -(-num_slots // size) - hit
        missing += _BLOCKS_OF_STATES * len(self.group.states)
        return PrefixState(fresh, missing + len(idle) + watermark, idle)

    @staticmethod
    def _unheld(blocks: Iterable[KVCacheBlock]) -> set[int]:
        return {block.block_id for block in blocks if block.ref_cnt == 0}

    def resident_blocks(self, request: Request, first: int, last: int) -> npt.NDArray[np.int32]:
        """Blocks `[first, last)` of a request that are cached under its own hashes, else -1.

        Only exact KV has such a name. A block named in this step has no KV yet.
        """
        found = np.full(last - first, -1, np.int32)
        for i, block_hash in enumerate(request.block_hashes[first:last]):
            cached = self._cached(block_hash)
            if cached is not None and cached.block_id not in self._fresh:
                found[i] = cached.block_id
        if self.siblings is not None:
            resident = np.flatnonzero(found >= 0)
            found[resident[~self.siblings.are_whole(found[resident].tolist())]] = -1
        return found

    def begin_step(self) -> None:
        """A scheduling step is over: its blocks will hold their KV before a later step reads it."""
        self._fresh.clear()

    @property
    def is_closed(self) -> bool:
        """Whether no further request may be admitted in this scheduling step."""
        return self._admission.closed

    def _cached(self, block_hash: BlockHash) -> KVCacheBlock | None:
        found = self.get_cached_block(block_hash, [self.group.index])
        return None if found is None else found[0]

    # What vLLM calls.

    def get_num_free_blocks(self) -> int:
        """Free blocks; none once admission is closed for this step.

        A failed allocation is the one way to end vLLM's loop over the waiting requests early
        (`v1/core/sched/scheduler.py`); answering "wait" to each would cost a prefix lookup each.
        Running requests have been served by then.
        """
        # For every request of every step: nothing but attributes are looked up.
        return 0 if self._admission.closed else self.free_block_queue.num_free_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Blocks from the front of the free queue; listeners are notified before they lose their
        names."""
        if self._keeps_evicted and num_blocks <= self.get_num_free_blocks():
            taken = [block.block_id for block in self._next_free(num_blocks) if block.block_hash]
            for listener in self._listeners if taken else ():
                listener.evicting(taken)
        self._evicted = evicted = list[int]()
        try:
            blocks = super().get_new_blocks(num_blocks)
            if self.siblings is not None:  # also those that had lost their names before
                evicted += self.siblings.lost([block.block_id for block in blocks])
            return blocks
        finally:
            self._evicted = None
            if evicted:
                self._report_evicted(evicted)

    def _next_free(self, num_blocks: int) -> Iterator[KVCacheBlock]:
        block = self.free_block_queue.fake_free_list_head
        for _ in range(num_blocks):
            assert block.next_free_block is not None
            block = block.next_free_block
            yield block

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
        """Name full blocks: exact names as far as they are known to be exact, names of our own
        behind that.

        Blocks that are exact once something restored is in place donate, and get their exact names,
        as soon as the workers have reported it (`restored`).

        A reference (`audit/`) has no hashes, and its blocks no names: nobody finds them.

        Of a window's blocks vLLM's mask leaves out those that its prefix cache needs less. Without
        names they would be the first to be taken, so those of requests that reuse get theirs.
        """
        if num_cached_blocks >= num_full_blocks or not request.block_hashes:
            return
        ends = self._naming.exact_ends(request.request_id)
        whole = num_full_blocks * block_size
        known_end, exact_end = (
            max(num_cached_blocks, min(num_full_blocks, until // block_size))
            for until in ends or (whole, whole)
        )
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            known_end,
            block_size,
            kv_cache_group_id,
            block_mask if ends is None else None,
        )
        names = [
            self._own_name(block, kv_cache_group_id)
            for block in blocks[known_end:num_full_blocks]
            if not block.is_null  # a window has passed it
        ]
        if num_full_blocks * block_size > request.num_computed_tokens:
            # Named by a step that is being scheduled, not by the output of one that has left.
            self._fresh.update(
                block.block_id
                for block in blocks[num_cached_blocks:num_full_blocks]
                if not block.is_null
            )
        if kv_cache_group_id != self.group.index:
            return
        if self.siblings is not None:
            self._note_siblings(self.siblings, request, num_cached_blocks, num_full_blocks)
        if ends is None:
            return
        if known_end == exact_end:
            self._report_named(request, blocks, num_cached_blocks, num_full_blocks)
            return
        number = self._naming.restoration(request.request_id)
        self._awaited.setdefault(number, []).append(
            _Awaited(request, blocks[:exact_end], known_end, names[: exact_end - known_end])
        )
        self._report_named(request, blocks, num_cached_blocks, known_end)
        self._report_named(request, blocks, exact_end, num_full_blocks)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, *args: Any, **kwargs: Any
    ) -> BlockHashWithGroupId | None:
        """vLLM names a state at the last boundary of a prompt once more, by itself. Behind what is
        exact it gets no such name."""
        ends = self._naming.exact_ends(request.request_id)
        if ends is not None and num_tokens > ends[0]:
            return None
        return super().cache_partial_block(request, block, num_tokens, *args, **kwargs)

    def state_at(self, request: Request, num_tokens: int, group: int) -> KVCacheBlock | None:
        """The block with the state behind so many tokens of a request, under its exact name.

        Args:
            num_tokens: in whole blocks.
            group: index of a group of states.
        """
        name = request.block_hashes[num_tokens // self.group.block_size - 1]
        found = self.get_cached_block(name, [group])
        return None if found is None else found[0]

    def _note_siblings(
        self, siblings: SiblingBlocks, request: Request, first: int, last: int
    ) -> None:
        """Blocks `[first, last)` of a request are being named, in all groups."""
        tables = self._blocks_of(request.request_id)
        ids = [
            [-1 if block.is_null else block.block_id for block in table[first:last]]
            for table in (self.group.of(tables), *self.group.of_others(tables))
        ]
        siblings.note(ids[0], ids[1:])

    def _own_name(self, block: KVCacheBlock, group: int) -> BlockHashWithGroupId:
        """Give a block of a group a name that no token sequence hashes to."""
        own = BlockHash(_OWN_NAME + next(self._own_names).to_bytes(8, "big"))
        name = make_block_hash_with_group_id(own, group)
        self._insert_block_hash(name, block, num_tokens=self.group.block_size)
        return name

    def _report_named(
        self, request: Request, blocks: Sequence[KVCacheBlock], first: int, last: int
    ) -> None:
        """Blocks `[first, last)` of a request have their names."""
        if first == last:
            return
        named = NamedBlocks(
            request.request_id,
            first,
            [block.block_id for block in blocks[first:last]],
            blocks[first - 1].block_id if first else -1,
            request.all_token_ids,
        )
        for listener in self._listeners:
            listener.named(named)

    def restored(self, number: int, in_place: bool, still_planned: bool) -> None:
        """The workers have reported a restoration: its blocks, and those computed behind it, get
        their exact names; if it failed, they keep what they have, and never donate.

        Blocks that have lost their names since are passed over: they may hold anything.

        Args:
            number: of the restoration.
            in_place: on all ranks.
            still_planned: whether the request has these blocks, by the same plan.
        """
        awaited = self._awaited.pop(number, [])
        for request, blocks, first, names in awaited if in_place else ():
            kept = [
                block.block_hash == name for block, name in zip(blocks[first:], names, strict=True)
            ]
            for is_kept, run in itertools.groupby(enumerate(kept, first), lambda each: each[1]):
                indices = [index for index, _ in run]
                if is_kept:
                    self._name_exactly(request, blocks, indices[0], indices[-1] + 1)
                    if still_planned:
                        self._report_named(request, blocks, indices[0], indices[-1] + 1)

    def _name_exactly(
        self, request: Request, blocks: list[KVCacheBlock], first: int, last: int
    ) -> None:
        """Exact names for blocks `[first, last)` of a request, in place of our own."""
        for block in blocks[first:last]:
            super()._remove_cached_block_hashes(block)
        size, group = self.group.block_size, self.group.index
        super().cache_full_blocks(request, blocks, first, last, size, group)

    def free_blocks(self, ordered_blocks: Any) -> None:
        """A block freed in the step that named it was never computed: it loses its names.

        vLLM itself keeps the exact one: with priorities and `long_prefill_token_threshold` a
        request can be preempted in the step that has scheduled it, and would then resume on it.

        Nameless blocks return to the front of the free queue in the order in which they were
        taken. So a reference, all of whose blocks are nameless, leaves the queue as it was, and
        later requests get the blocks that they would have had.
        """
        ordered_blocks = _nameless_reversed(list(ordered_blocks))
        if self._fresh:
            for block in ordered_blocks:
                if block.block_id in self._fresh and block.ref_cnt == 1:
                    self._emit_block_removed_events(self._remove_cached_block_hashes(block))
        super().free_blocks(ordered_blocks)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        removed = super()._remove_cached_block_hashes(block)
        if removed:
            if self._evicted is None:
                self._report_evicted([block.block_id])
            else:
                self._evicted.append(block.block_id)
        return removed

    def _report_evicted(self, block_ids: list[int]) -> None:
        if self.siblings is not None:
            block_ids = [*block_ids, *self.siblings.lost(block_ids)]
        for listener in self._listeners:
            listener.evicted(block_ids)

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        if self.enable_kv_cache_events:
            super()._emit_block_removed_events(
                [h for h in block_hashes if not get_block_hash(h).startswith(_OWN_NAME)]
            )

    def reset_prefix_cache(self) -> bool:
        """Forget all names. vLLM refuses while any block is held, so listeners release theirs."""
        for listener in self._listeners:
            listener.resetting()
        done = super().reset_prefix_cache()
        if done:
            self._fresh.clear()
            self._awaited.clear()
            if self.siblings is not None:
                self.siblings.clear()
            for listener in self._listeners:
                listener.reset()
        return done


def _nameless_reversed(blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
    """vLLM frees a request's last block first."""
    nameless = [block for block in blocks if block.block_hash is None]
    if len(nameless) < 2:
        return blocks
    return [*reversed(nameless), *(block for block in blocks if block.block_hash is not None)]
