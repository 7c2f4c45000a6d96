# SPDX-License-Identifier: Apache-2.0
"""A KV connector of vLLM's that does nothing: what the interface costs (`bench overhead`)."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class IdleConnector(KVConnectorBase_V1):
    """vLLM documents the interface (`kv_connector/v1/base.py`)."""

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        """None."""
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        """Nothing."""

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        """Nothing for the workers."""
        return KVConnectorMetadata()

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, _: str) -> None:
        """Nothing."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
