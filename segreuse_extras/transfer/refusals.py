# SPDX-License-Identifier: Apache-2.0
"""What is not proven beside a transfer connector, refused at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from segreuse_extras.transfer.options import TransferServer
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.model.documents import sees_documents_alone
from vllm_segreuse.options.server import ServerOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


KNOWN_EARLY = True
"""The configuration tells all of it: a model need not be loaded, nor a tokenizer."""


def check(vllm_config: VllmConfig, config: ServerOptions) -> None:
    """Refuse what contradicts a transfer connector.

    Raises:
        RefusedError: naming the first reason and the way out.
    """
    if TransferServer.of(config).beside is None:
        return
    faults = _faults(vllm_config) + _faults_of_receivers(vllm_config, config)
    if reasons := [why for wrong, why in faults if wrong]:
        raise RefusedError(*reasons)


def _faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    model = vllm_config.model_config
    return [
        (
            sees_documents_alone(model),
            "beside cannot be combined with a model that was trained on documents computed alone "
            "(segreuse.isolated_documents in its config.json): remove it",
        ),
        (
            model.enable_sleep_mode and not hasattr(KVConnectorBase_V1, "restore_kv_caches"),
            "beside cannot be combined with --enable-sleep-mode in vLLM 0.32, whose connectors do "
            "not follow the KV cache when it is mapped anew: remove it, or install vLLM 0.33",
        ),
    ]


def _faults_of_receivers(vllm_config: VllmConfig, config: ServerOptions) -> list[tuple[bool, str]]:
    """Of an engine whose blocks others write, in no order with its own steps."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_consumer:
        return []
    by = f"with kv_role={transfer.kv_role} other engines write into blocks between its steps"
    scheduling = vllm_config.scheduler_config
    overlaps = vllm_config.max_concurrent_batches > 1
    return [
        (
            TierServer.of(config).tier is not None,
            f"{by}, and the second tier reads evicted blocks then: remove tier, or give it to the "
            "prefill engines",
        ),
        (
            config.spread_tokens != 0,
            f"{by}, and a plan over several steps may still read them: set spread_tokens: 0",
        ),
        (
            overlaps and scheduling.policy == "priority",
            f"{by}, and with priorities vLLM frees blocks late that were never computed: remove "
            "--scheduling-policy priority, or add --no-async-scheduling",
        ),
        (
            vllm_config.model_config.is_multimodal_model,
            f"with kv_role={transfer.kv_role} vLLM accepts images without their content, which is "
            "not proven; use a model of text, or kv_role=kv_producer",
        ),
    ]
