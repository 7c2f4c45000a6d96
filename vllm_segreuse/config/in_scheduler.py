# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of an engine, made with all of its features."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.matcher import warm_up
from vllm_segreuse.compat import (
    kv_cache_manager,
    single_type_kv_cache_manager,
    triton_dispatcher,
)
from vllm_segreuse.compat.block_events import Naming
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.engine.stage import layers_of_stages
from vllm_segreuse.features import having
from vllm_segreuse.features.knowledge.scheduler import FrozenDocuments
from vllm_segreuse.features.tier.options import TierOptions, TierServer
from vllm_segreuse.features.tier.start import most_records, start_tier
from vllm_segreuse.options.server import STEP_TOKENS, ServerOptions
from vllm_segreuse.plan import ModelLayers, Program, ReusePlan
from vllm_segreuse.scheduling.budget import StepBudget
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.donors import Donors
from vllm_segreuse.scheduling.exact_names import ExactNames
from vllm_segreuse.scheduling.feature import Features
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.methods import Methods
from vllm_segreuse.scheduling.parts import Parts
from vllm_segreuse.scheduling.planner import BlockPins, Planner
from vllm_segreuse.scheduling.reporting import Accounts
from vllm_segreuse.scheduling.scheduler import SchedulerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def scheduler_side(
    vllm_config: VllmConfig,
    config: ServerOptions,
    manager: KVCacheManager,
    stats: Counted,
    group: KvGroup,
    region: SharedOffloadRegion | None = None,
) -> SchedulerSide:
    """That of an engine.

    Args:
        vllm_config: the engine's.
        config: the server's options.
        manager: vLLM's; its block pool becomes a `SegmentBlockPool`.
        stats: counts what happens.
        group: whose blocks are reused.
        region: host memory of the second tier, if there is one.
    """
    triton_dispatcher.install()  # numba is loaded from here on
    kv_cache_manager.install()
    if group.others:
        single_type_kv_cache_manager.install()
    warm_up()
    options = TierServer.of(config).tier or TierOptions()
    records = 0 if region is None else most_records(region, options)
    core = Core.of(vllm_config, config, manager, group, stats, records)
    making = Making(
        core,
        ContentFinder(core.index, config.max_provenance_depth),
        None if region is None else start_tier(core, options, region),
    )
    return SchedulerSide(_parts(making, _features(making)))


def _features(making: Making) -> Features:
    """Those that the engine needs, in their order."""
    for module in having("scheduler"):
        feature = module.start(making)
        if feature is not None:
            making.made.append(feature)
    return Features(making.made)


def _parts(making: Making, features: Features) -> Parts:
    core, store = making.core, making.store
    layers = ModelLayers.of_full_attention(
        core.vllm_config.model_config.get_total_num_hidden_layers()
    )
    methods = Methods(
        core.block_size,
        layers,
        making.by_content,
        [feature.finder for feature in features.having("finder")],
    )
    donors = Donors(
        core.index,
        core.requests,
        core.config.max_provenance_depth,
        core.health,
        [follower for feature in features for follower in feature.followers],
        core.pool.are_whole,
    )
    budget = StepBudget(_step_tokens(core))
    make_room = making.earlier(FrozenDocuments).freezing.make_room
    planner = Planner(
        core.requests,
        _pins(core, features),
        make_room,
        budget,
        core.health,
        core.block_size,
        is_spread=functools.partial(_is_spread, core, methods),
        clock=time.perf_counter,
        on_match=functools.partial(core.stats.observe, "match_seconds"),
        tier=store,
        stages_run=_stages_run(core, methods),
    )
    naming: Naming = ExactNames(core.requests, planner, core.block_size)
    for feature in features.having("naming"):
        naming = feature.naming(naming)
    core.pool.attach(
        naming,
        budget,
        make_room,
        features.listeners(donors),
        keeps_evicted=store is not None,
    )
    return Parts(core, methods, Accounts(core.stats, layers), features, donors, planner)


def _stages_run(core: Core, methods: Methods) -> Callable[[Program], bool] | None:
    """Whether the layers of an engine's first pipeline stage are enough for what a program has to
    compute before only known tokens are left; None: there is one stage."""
    if core.vllm_config.parallel_config.pipeline_parallel_size == 1:
        return None
    first = len(layers_of_stages(core.vllm_config)[0])
    return lambda program: program.layers_before_choice(methods.layers) <= first


def _pins(core: Core, features: Features) -> BlockPins:
    """Who holds the donors of plans."""
    pins: BlockPins = core.pool
    for feature in features.having("pins"):
        pins = feature.pins(pins)
    return pins


def _step_tokens(core: Core) -> int:
    """Most tokens that the plans of one step compute."""
    device = "cpu" if current_platform.is_cpu() else "other"
    wanted = core.config.max_step_tokens or STEP_TOKENS[device]
    return min(wanted, core.vllm_config.scheduler_config.max_num_batched_tokens)


def _is_spread(core: Core, methods: Methods, plan: ReusePlan) -> bool:
    """Whether a plan is so large that others who run would wait for it too long, or that its states
    would not fit beside those of another that is under way (`config/memory.py`).

    vLLM keeps an adapter loaded in the steps of its requests only, so a plan with an adapter is
    carried out in one step. So is one of a prompt with images, behind which vLLM may have to go on
    with a new one; and one of layers with blocks of their own, which vLLM frees where the window
    has passed them as soon as a request ends, and states with what is behind them.
    """
    if not core.group.is_alone:
        return False
    most = core.vllm_config.scheduler_config.max_num_batched_tokens
    above = core.config.spread_work(most, methods.layers.in_all)
    if plan.lora_id or plan.mrope_positions is not None or above is None:
        return False
    if not kv_cache_manager.has_running_requests(core.manager):
        return False
    return plan.layer_tokens(methods.layers) > above or plan.active_tokens > most
