# SPDX-License-Identifier: Apache-2.0
"""The parts of the scheduler's half, made in the order in which they need each other."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_segreuse.accounts import Accounts
from vllm_segreuse.cache.budget import StepBudget
from vllm_segreuse.cache.donors import Donors
from vllm_segreuse.cache.exact_names import ExactNames
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.forgotten import Forgotten
from vllm_segreuse.cache.matcher import warm_up
from vllm_segreuse.cache.planner import Planner
from vllm_segreuse.compat.kv_cache_manager import is_anybody_admitted
from vllm_segreuse.config import STEP_TOKENS, SegReuseConfig
from vllm_segreuse.documents.layout import Layout
from vllm_segreuse.features.in_scheduler import SchedulerFeatures, scheduler_features
from vllm_segreuse.features.tier.start import most_records, start_tier
from vllm_segreuse.kv_group import KvGroup
from vllm_segreuse.methods import Methods
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.plan import ModelLayers, ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.similarity import similar_segments
from vllm_segreuse.tier_options import TierOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

FORGOTTEN_PER_BLOCK = 4
"""Blocks that no longer donate are remembered, for each that there is: 36 bytes."""


@dataclass(frozen=True)
class Parts:
    """One of each per engine.

    Attributes:
        core: what features share.
        methods: policies of requests.
        accounts: what requests did not have to compute.
        features: of the engine.
        donors: blocks that donate.
        planner: makes plans.
    """

    core: Core
    methods: Methods
    accounts: Accounts
    features: SchedulerFeatures
    donors: Donors
    planner: Planner


def build(
    vllm_config: VllmConfig,
    config: SegReuseConfig,
    manager: KVCacheManager,
    stats: SegReuseStats,
    group: KvGroup,
    region: SharedOffloadRegion | None,
    layout: Layout | None,
) -> Parts:
    """Those of an engine; see `SchedulerSide` for the arguments."""
    warm_up()
    options = config.tier or TierOptions()
    records = 0 if region is None else most_records(region, options)
    core = Core.of(vllm_config, config, manager, group, stats, records)
    layers = ModelLayers.of_full_attention(
        vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    )
    by_content = ContentFinder(core.index, config.max_provenance_depth)
    similar = similar_segments(
        vllm_config.model_config, config, core.index, core.namespaces, by_content, stats
    )
    methods = Methods(config, group.block_size, layers, by_content, similar)
    forgotten = Forgotten(core.index, core.namespaces, FORGOTTEN_PER_BLOCK * core.num_blocks)
    store = None if region is None else start_tier(core, options, region)
    features = scheduler_features(core, methods, forgotten, store, layout)
    donors = Donors(
        core.index,
        core.requests,
        config.max_provenance_depth,
        core.health,
        forgotten,
        [] if similar is None else [similar.store],
    )
    budget = StepBudget(_step_tokens(vllm_config, config))
    planner = Planner(
        core.requests,
        core.pool,
        features.frozen.freezing.make_room,
        budget,
        core.health,
        group.block_size,
        is_spread=functools.partial(_is_spread, core, methods),
        clock=time.perf_counter,
        on_match=functools.partial(stats.observe, "match_seconds"),
        tier=store,
    )
    core.pool.attach(
        ExactNames(core.requests),
        budget,
        features.frozen.freezing.make_room,
        features.listeners(donors),
        keeps_evicted=store is not None,
    )
    return Parts(core, methods, Accounts(stats, layers), features, donors, planner)


def _step_tokens(vllm_config: VllmConfig, config: SegReuseConfig) -> int:
    """Most tokens that the plans of one step compute."""
    device = "cpu" if current_platform.is_cpu() else "other"
    wanted = config.max_step_tokens or STEP_TOKENS[device]
    return min(wanted, vllm_config.scheduler_config.max_num_batched_tokens)


def _is_spread(core: Core, methods: Methods, plan: ReusePlan) -> bool:
    """Whether a plan is so large that others who run would wait for it too long, or that its states
    would not fit beside those of another that is under way (`memory.py`).

    vLLM keeps an adapter loaded in the steps of its requests only, so a plan with an adapter is
    carried out in one step. So is one of a prompt with images, behind which vLLM may have to go on
    with a new one.
    """
    most = core.vllm_config.scheduler_config.max_num_batched_tokens
    above = core.config.spread_work(most, methods.layers.count)
    if plan.lora_id or plan.numbers is not None or above is None:
        return False
    if not is_anybody_admitted(core.manager):
        return False
    return plan.layer_tokens(methods.layers) > above or plan.active_tokens > most
