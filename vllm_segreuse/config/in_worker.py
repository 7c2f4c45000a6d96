# SPDX-License-Identifier: Apache-2.0
"""A worker's half, made with those of all features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.features import having
from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.cells import cell_content_bytes
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.prefill.checks import OtherStages, Runtime
from vllm_segreuse.prefill.feature import MakingWorker, WorkerFeature
from vllm_segreuse.prefill.worker import WorkerSide, backlog_of, proven

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def worker_side(
    vllm_config: VllmConfig,
    config: ServerOptions,
    kv_cache_config: KVCacheConfig,
    stats: Counted,
) -> WorkerSide:
    """Proves the sparse pass on the loaded model.

    Args:
        vllm_config: the engine's.
        config: the server's options.
        kv_cache_config: vLLM's; the caches are bound to their layers.
        stats: counts what happens.

    Raises:
        RefusedError: what could not be proven.
    """
    tier = TierServer.of(config).tier
    codec = Codec.RAW if tier is None else Codec(tier.codec)
    if codec is not Codec.RAW:
        cell_content_bytes(kv_cache_config, codec)  # it refuses what the codec cannot store
    linked = (module.linked(vllm_config) for module in having("stages"))
    stages: OtherStages | None = next((it for it in linked if it is not None), None)
    others = (it.runtime_of(vllm_config, kv_cache_config, config) for it in having("runtime"))
    runtime: Runtime | None = next((it for it in others if it is not None), None)
    if runtime is None:
        runtime = proven(vllm_config, kv_cache_config, config.cuts, codec, stats, stages)
    making = MakingWorker(vllm_config, config, kv_cache_config, runtime)
    made = [module.start(making) for module in having("worker")]
    features: list[WorkerFeature] = [feature for feature in made if feature is not None]
    prefill = runtime.prefill
    for feature in features:
        prefill = feature.carried_out_by(prefill)
    backlog = backlog_of(prefill, vllm_config, config, stages)
    return WorkerSide(backlog, features, stats, vllm_config.parallel_config.rank == 0)
