# SPDX-License-Identifier: Apache-2.0
"""vLLM's own KV cache manager with the scheduler's half behind it; no engine, and no KV."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import ObservabilityConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tests.parts import parts_of
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.in_scheduler import scheduler_side
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.plan import FreezeOrder, Pieces, Recipe, ReusePlan
from vllm_segreuse.scheduling.tracked import TrackedRequest

SIZE, LIMIT = 4, 40
"""Tokens per block, and of the longest request."""
OPTIONS = {"extra_keys": "tests", "segreuse_policy": "shift", "segreuse_min_reused_tokens": 4}
_ids = count()


def manager_of(num_blocks: int, windows: tuple[int, ...] = (), **options: Any) -> KVCacheManager:
    """vLLM's manager; one block is vLLM's own.

    Args:
        windows: of further groups, before the one that keeps all blocks.
    """
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [SlidingWindowSpec(block_size=SIZE, sliding_window=it, **shape) for it in windows]
    groups = [
        KVCacheGroupSpec([f"layer {i}"], spec)
        for i, spec in enumerate([*specs, FullAttentionSpec(block_size=SIZE, **shape)])
    ]
    # As vLLM has it by default: of a window's blocks few are named.
    config = KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=0)
    return KVCacheManager(
        config, max_model_len=LIMIT, scheduler_block_size=SIZE, hash_block_size=SIZE, **options
    )


class Managed:
    """A manager whose block pool is ours.

    Args:
        num_blocks: of the pool.
        options: of vLLM's manager.
        segreuse: options of the server.
    """

    def __init__(
        self, num_blocks: int = 32, segreuse: dict[str, Any] | None = None, **options: Any
    ) -> None:
        init_none_hash(sha256)
        self.manager = manager_of(num_blocks, **options)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                get_total_num_hidden_layers=lambda: 4,
                max_model_len=LIMIT,
                hf_config=SimpleNamespace(),
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            observability_config=ObservabilityConfig(),
            cache_config=SimpleNamespace(block_size=SIZE),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
        )
        given = SegReuseConfig(**(segreuse or {}))
        group = segment_group(self.manager.kv_cache_config)
        self.side = scheduler_side(config, given, self.manager, SegReuseStats(), group)
        self.pool: Any = self.manager.block_pool
        self.index, self.health = parts_of(self.side).index, parts_of(self.side).health
        self.planner, self.donors = parts_of(self.side).planner, parts_of(self.side).donors
        self.freezing, self.frozen = (
            parts_of(self.side).freezing,
            parts_of(self.side).entries,
        )

    def request(self, tokens: list[int], options: Any = OPTIONS) -> Request:
        """A request arrives."""
        request = Request(
            request_id=f"request {next(_ids)}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=4, extra_args=options),
            pooling_params=None,
            block_hasher=get_request_block_hasher(SIZE, sha256),
        )
        self.side.add(request)
        return request

    def tracked(self, request: Request) -> TrackedRequest:
        """What is known of it."""
        tracked = self.planner.get(request.request_id)
        assert tracked is not None
        return tracked

    def named(self, request: Request) -> list[KVCacheBlock]:
        """The request gets blocks, and vLLM names the full ones; their step is not over."""
        full = request.num_tokens // SIZE
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(full)
        self.pool.cache_full_blocks(request, blocks, 0, full, SIZE, 0)
        return blocks

    def computed(self, tokens: list[int], options: Any = OPTIONS) -> list[KVCacheBlock]:
        """Blocks of a request that has ended."""
        request = self.request(tokens, options)
        blocks = self.named(request)
        self.side.take_step(True)
        self.side.finished(request, ids(blocks))
        self.pool.free_blocks(reversed(blocks))
        return blocks

    def freeze(self, name: str, num_blocks: int) -> None:
        """Blocks that the frozen pool alone holds."""
        blocks = self.pool.get_new_blocks(num_blocks)
        namespace = parts_of(self.side).namespaces.intern(b"frozen")
        part = FrozenPart(namespace, ids(blocks), None)
        assert self.frozen.add(FreezeOrder(name, 0, 1, 0), part)
        parts_of(self.side).namespaces.release(namespace)
        self.pool.free_blocks(blocks)

    @property
    def warm(self) -> set[str]:
        """What is frozen."""
        return set(self.frozen.warm())

    def hold_all_but(self, num_free: int) -> list[KVCacheBlock]:
        """Somebody takes blocks until so many are free."""
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(
            self.pool.num_free_blocks() - num_free
        )
        return blocks


def plan_of(request: Request, start: int, always: list[bool] | None = None, depth: int = 0) -> Any:
    """A plan of a request's tokens from `start` on, all of which are computed."""
    tokens = np.asarray(request.all_token_ids[start:], np.int32)
    recipe = Recipe.without_choice(np.asarray(always or [True] * len(tokens), np.bool_))
    pieces = Pieces.from_table([])
    stop = start + len(tokens)
    return ReusePlan(request.request_id, start, stop, tokens, pieces, recipe, [], depth)


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    """Their ids."""
    return [block.block_id for block in blocks]
