# SPDX-License-Identifier: Apache-2.0
"""What the features of an engine share in the scheduler's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable, owner_of
from vllm_segreuse.cache.siblings import Siblings
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.engine.kv_slots import KvSlots
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.plan import OtherTable, ReusePlan
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass(frozen=True)
class Core:
    """One per engine.

    Attributes:
        vllm_config: the engine's.
        config: the server's options.
        manager: vLLM's.
        pool: its block pool, which became one of ours.
        group: whose blocks are reused.
        slots: that vLLM takes for requests.
        index: which blocks hold which text.
        namespaces: of the ids in the index.
        health: where errors over what all requests share end.
        requests: those with extra keys, by id, from arrival to end.
        stats: counts what happens.
        siblings: of blocks in other groups; None: there is one group.
    """

    vllm_config: VllmConfig
    config: ServerOptions
    manager: KVCacheManager
    pool: SegmentBlockPool
    group: KvGroup
    slots: KvSlots
    index: SegmentIndex
    namespaces: NamespaceTable
    health: Health
    requests: dict[str, TrackedRequest]
    stats: Counted
    siblings: Siblings | None = None

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        config: ServerOptions,
        manager: KVCacheManager,
        group: KvGroup,
        stats: Counted,
        num_records: int,
    ) -> Core:
        """That of an engine.

        Args:
            num_records: of the second tier, at most, which the index knows beside blocks.
        """
        siblings, found = None, manager.block_pool
        if group.others:
            siblings = Siblings(found.num_gpu_blocks, len(group.others))
            pool = SegmentBlockPool.adopt(found, group, siblings, manager.coordinator.get_blocks)
        else:
            pool = SegmentBlockPool.adopt(found, group)
        index = SegmentIndex(
            pool.num_gpu_blocks + num_records,
            group.block_size,
            owner_of=lambda namespace: owner_of(namespaces.key(namespace)),
        )
        namespaces = NamespaceTable(lambda namespace: index.population(namespace) > 0)
        slots = KvSlots.of(vllm_config)
        known = vllm_config, config, manager, pool, group, slots, index, namespaces
        return cls(*known, Health(), {}, stats, siblings)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.group.block_size

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits beside what is held, as vLLM counts it."""
        needed = -(-num_tokens // self.block_size) * self.group.num_tables
        needed += self.manager.watermark_blocks
        return self.pool.num_free_blocks() >= needed

    def other_tables(
        self, plan: ReusePlan, tables: Sequence[Sequence[int]]
    ) -> tuple[OtherTable, ...]:
        """Where a plan reads and writes in the other groups, while its donors are pinned.

        Args:
            tables: the request's blocks in each of them.
        """
        assert self.siblings is not None
        sources = self.siblings.of(plan.pieces.block)
        return tuple(
            OtherTable(np.asarray(table, np.int32), np.ascontiguousarray(found))
            for table, found in zip(tables, sources, strict=True)
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can have: one is vLLM's own."""
        return int(self.pool.num_gpu_blocks) - 1
