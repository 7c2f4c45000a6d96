# SPDX-License-Identifier: Apache-2.0
"""What a transfer connector changes of the engine's configuration: its role, and the class that
hosts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segreuse_extras.transfer.options import TransferServer
from vllm_segreuse.options.server import ConfigError, ServerOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR = "SegReuseTransferConnector"
_MODULE = "segreuse_extras.transfer.connector"


def role_of(options: ServerOptions) -> str | None:
    """The engine's role, where the options have one."""
    beside = TransferServer.of(options).beside
    return None if beside is None else beside.kv_role


def completed(config: KVTransferConfig, options: ServerOptions) -> bool:
    """Checks role and transfer connector, and completes `config` with the class that runs them.

    Returns:
        Whether there is a transfer connector.

    Raises:
        ConfigError: its role is another one; or it cannot be hosted.
    """
    beside = TransferServer.of(options).beside
    if beside is None:
        return False
    # Imported here: it loads vLLM's connectors.
    from segreuse_extras.transfer.hosted import connector_class, transfer_config

    if beside.kv_role not in (None, config.kv_role):
        raise ConfigError(
            f"beside.kv_role={beside.kv_role}, and kv_role={config.kv_role} in "
            "--kv-transfer-config: give both the same, or drop beside.kv_role"
        )
    if beside.kv_load_failure_policy is not None:
        config.kv_load_failure_policy = beside.kv_load_failure_policy
    connector_class(transfer_config(beside, config))
    config.kv_connector, config.kv_connector_module_path = CONNECTOR, _MODULE
    return True
