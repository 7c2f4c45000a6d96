# SPDX-License-Identifier: Apache-2.0
"""What carries plans out where layers hand a state on: proven on the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm.logger import init_logger

from vllm_segreuse.engine.kv_group import groups_of_states, segment_group
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.prefill.checks import Runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from segreuse_extras.states.prefill import StatesPrefill

logger = init_logger("vllm.segreuse")


def runtime_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ServerOptions
) -> Runtime | None:
    """In the place of the pass; None: no layer hands a state on.

    Raises:
        RefusedError: what could not be proven.
    """
    if not groups_of_states(kv_cache_config):
        return None
    # Imported here: other models do without these layers.
    from segreuse_extras.states.building import proven_states

    runtime = proven_states(vllm_config, kv_cache_config, config, segment_group(kv_cache_config))
    logger.info(
        "segment reuse: composed states are proven on this model (largest deviation %.1e); %s",
        runtime.max_deviation,
        runtime.kernels,
    )
    for unknown in cast("StatesPrefill", runtime.prefill).state_layers.unknown:
        logger.warning("segment reuse: %s (docs/models.md)", unknown)
    return runtime
