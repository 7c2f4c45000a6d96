# SPDX-License-Identifier: Apache-2.0
"""The transfer connector that is hosted: its class, its configuration, and itself."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from segreuse_extras.transfer.options import BesideOptions, refusal
from vllm_segreuse.compat import nixl
from vllm_segreuse.options.server import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_REUSES = "segreuse"
"""Key of the hosted connector's options that says whose it is."""

_OWN_KEYS = ("name_free", "kv_load_failure_policy")
"""Of `beside`, which the hosted connector does not have: the engine has one policy."""


def transfer_config(beside: BesideOptions, outer: KVTransferConfig) -> KVTransferConfig:
    """The hosted connector's configuration.

    Args:
        beside: what the operator has given.
        outer: of the engine: its role, its id.
    """
    given = beside.model_dump(exclude_unset=True, exclude=set(_OWN_KEYS))
    extra = {**beside.kv_connector_extra_config, _REUSES: True}
    fields: dict[str, Any] = {
        "kv_role": outer.kv_role,
        "kv_buffer_device": outer.kv_buffer_device,
        "kv_port": outer.kv_port,
        **{key: value for key, value in given.items() if value is not None},
        "kv_connector_extra_config": extra,
        "engine_id": outer.engine_id,
        "kv_load_failure_policy": outer.kv_load_failure_policy,
    }
    return KVTransferConfig(**fields)


def engine_config(beside: BesideOptions, vllm_config: VllmConfig) -> VllmConfig:
    """The engine's configuration as the hosted connector sees it, as in vLLM's `MultiConnector`."""
    outer = vllm_config.kv_transfer_config
    assert outer is not None
    seen = copy.copy(vllm_config)
    seen.kv_transfer_config = transfer_config(beside, outer)
    return seen


def connector_class(config: KVTransferConfig) -> type[KVConnectorBase_V1]:
    """The class of the hosted connector.

    Raises:
        ConfigError: it cannot be loaded, or it is known, or says of itself, that it cannot be
            hosted.
    """
    try:
        found: Any = KVConnectorFactory.get_connector_class(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"beside: {config.kv_connector} cannot be loaded: {error}") from error
    if not issubclass(found, KVConnectorBase_V1):
        raise ConfigError(f"beside: {config.kv_connector} is no KVConnectorBase_V1")
    connector: type[KVConnectorBase_V1] = found
    for base in connector.__mro__:
        if reason := refusal(base.__name__):
            raise ConfigError(f"beside: {config.kv_connector} cannot be hosted: {reason}")
    if connector.requires_piecewise_for_cudagraph(config.kv_connector_extra_config):
        raise ConfigError(
            f"beside: {config.kv_connector} loads or stores KV layer by layer, while the model "
            "runs; reused KV does not pass there: use a connector that hands whole blocks over"
        )
    return connector


def made(
    beside: BesideOptions,
    vllm_config: VllmConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
) -> KVConnectorBase_V1:
    """The hosted connector, in the scheduler's process or in a worker.

    Raises:
        ConfigError: see `connector_class`; or it needs what cannot be forwarded.
    """
    config = engine_config(beside, vllm_config)
    assert config.kv_transfer_config is not None
    found = connector_class(config.kv_transfer_config)
    if _is_nixl(found):
        nixl.install(is_hosted)
    connector = found(config, role, kv_cache_config)
    count, workers = connector.get_finished_count(), vllm_config.parallel_config.world_size
    if count not in (None, workers):
        raise ConfigError(
            f"beside: {beside.kv_connector} counts on {count} reports of a transfer, and plans of "
            f"segment reuse on one of each of {workers} workers; use another connector"
        )
    return connector


def is_hosted(vllm_config: VllmConfig) -> bool:
    """Whether a connector's configuration is that of one that is hosted here."""
    config = vllm_config.kv_transfer_config
    return config is not None and bool(config.get_from_extra_config(_REUSES, False))


def _is_nixl(found: type[KVConnectorBase_V1]) -> bool:
    return any(base.__name__ == "NixlBaseConnector" for base in found.__mro__)
