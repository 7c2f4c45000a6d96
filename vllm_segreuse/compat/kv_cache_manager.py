# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.core.kv_cache_manager.KVCacheManager`: frozen blocks go before a request has to wait, a
pass gets slots for a question that vLLM computes later, and a prefix hit ends in front of
compressed documents, or goes on with what an earlier turn left.

vLLM preempts or holds requests back where `allocate_slots` finds too few free blocks, and has no
hook to evict blocks that a connector holds. A failed allocation changes nothing, so it is repeated.

It allocates slots for what it computes in a step. A pass reads the question before that, also where
vLLM computes it in several steps, or only once a plan of several steps is done. So its slots are
asked for as lookahead, which vLLM has for drafts: they are filled by later steps.

A request skips vLLM's prefix lookup or takes all of what it finds. Where it names compressed
documents, the KV of their kept tokens as a text is not what it asks for. Blocks without exact names
are found by nobody, and a connector can only copy them, though a request may want them as they are.

Obsolete when blocks can be kept with a priority below running requests, and a connector can bound a
request's prefix hit, add resident blocks to it, or ask for slots: vllm-project/vllm#37003 and
vllm-project/vllm#38514 propose retention by token range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.compat.patching import signature_with, wrap


def install() -> None:
    """Wrap the allocation and the prefix lookup, once."""
    wrap(KVCacheManager, "allocate_slots", _allocate_slots)
    wrap(KVCacheManager, "get_computed_blocks", _get_computed_blocks)


def _allocate_slots(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = signature_with(original, "num_lookahead_tokens")
    lookahead = signature.parameters["num_lookahead_tokens"].default

    def retried(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        pool = self.block_pool
        if not isinstance(pool, SegmentBlockPool):
            return original(self, request, num_new_tokens, *args, **kwargs)
        given = signature.bind(self, request, num_new_tokens, *args, **kwargs).arguments
        options = dict(list(given.items())[3:])
        ahead = pool.written_until(request.request_id) - _computed(request, options)
        more = {"num_lookahead_tokens": max(_lookahead(options), ahead - num_new_tokens)}
        allocate = partial(original, self, request, num_new_tokens, **options | more)
        if pool.siblings is not None and options.get("num_external_computed_tokens"):
            local = int(request.num_computed_tokens + options.get("num_new_computed_tokens", 0))
            allocate = partial(_with_all_blocks, pool, local, allocate)
        allocated, needed = allocate(), 0
        while allocated is None and not pool.is_closed:
            needed = _blocks_needed(self, request, num_new_tokens, options)
            if not pool.make_room(needed - pool.num_free_blocks()):
                break
            allocated = allocate()
        # A request that waits for others, or for the next step, keeps its plan.
        if (
            allocated is None
            and not (pool.is_closed or has_running_requests(self))
            and pool.allocation_failed(request.request_id, max(1, needed - pool.num_free_blocks()))
        ):
            allocated = allocate()
        return allocated

    # Called for each running request in every step, with these arguments alone; `*args, **kwargs`
    # take three times as long.
    def allocate_slots(
        self: Any,
        request: Any,
        num_new_tokens: int,
        *args: Any,
        num_lookahead_tokens: int = lookahead,
        **kwargs: Any,
    ) -> Any:
        if args or kwargs:
            if num_lookahead_tokens != lookahead:
                kwargs["num_lookahead_tokens"] = num_lookahead_tokens
            return retried(self, request, num_new_tokens, *args, **kwargs)
        allocated = original(
            self, request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens
        )
        if allocated is not None:
            return allocated
        return retried(self, request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)

    return allocate_slots


def _get_computed_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found, num_tokens, boundary = original(self, request, *args, **kwargs)
        pool = self.block_pool
        if not isinstance(pool, SegmentBlockPool):
            return found, num_tokens, boundary
        size = pool.group.block_size
        count = pool.exact_stop(request.request_id) // size
        if num_tokens > count * size:
            kept = tuple(blocks[:count] for blocks in found.blocks)
            return self.create_kv_cache_blocks(kept), count * size, boundary
        most = args[0] if args else kwargs.get("max_cache_hit_length")  # of 0.33
        stop = request.num_tokens - 1 if most is None else most
        more = pool.left_behind(request.request_id, num_tokens, stop)
        if more:
            found = self.create_kv_cache_blocks(([*pool.group.of(found.blocks), *more],))
        return found, num_tokens + len(more) * size, boundary

    return get_computed_blocks


def _blocks_needed(manager: Any, request: Any, num_new_tokens: int, options: dict[str, Any]) -> int:
    """Free blocks with which the allocation cannot fail: enough for all that is known of it."""
    tokens = max(request.num_tokens, _computed(request, options) + num_new_tokens)
    tokens += _lookahead(options)
    group = manager.block_pool.group
    total = -(-min(tokens, manager.max_model_len) // group.block_size)
    hit, tables = options.get("new_computed_blocks"), manager.get_block_ids(request.request_id)
    needed = manager.watermark_blocks + options.get("reserved_blocks", 0)
    for index in (group.index, *group.others):
        found = () if hit is None else hit.blocks[index]
        # Blocks that a window has passed are vLLM's null block, and need none.
        shared = sum(block.ref_cnt > 0 or block.is_null for block in found)
        needed += total - len(tables[index]) - shared
    return int(needed)


def _with_all_blocks(pool: SegmentBlockPool, start: int, allocate: Callable[[], Any]) -> Any:
    """Allocate for what a plan supplies from `start` on (`single_type_kv_cache_manager.py`)."""
    pool.window_end = start
    try:
        return allocate()
    finally:
        pool.window_end = None


def _computed(request: Any, options: dict[str, Any]) -> int:
    """Tokens of a request that are computed, or found, before what is allocated for."""
    found = ("num_new_computed_tokens", "num_external_computed_tokens")
    return int(request.num_computed_tokens + sum(options.get(name, 0) for name in found))


def _lookahead(options: dict[str, Any]) -> int:
    return int(options.get("num_lookahead_tokens", 0))


def has_running_requests(manager: Any) -> bool:
    """Whether a request holds blocks: it runs, or is set aside for what it loads."""
    of_group = manager.block_pool.group.of(manager.coordinator.single_type_managers)
    return any(of_group.req_to_blocks.values())
