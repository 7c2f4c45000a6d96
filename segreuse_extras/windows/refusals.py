# SPDX-License-Identifier: Apache-2.0
"""What is not proven where layers with a window have blocks of their own, refused at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_segreuse.engine.supported import NO_KV, RefusedError
from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.model.documents import sees_documents_alone
from vllm_segreuse.options.server import ServerOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN_EARLY = True
"""The configuration tells all of it: a model need not be loaded, nor a tokenizer."""

FLAG = "--no-disable-hybrid-kv-cache-manager"


def check(vllm_config: VllmConfig, config: ServerOptions) -> None:
    """Refuse what contradicts vLLM's hybrid KV cache manager, where it was asked for.

    Raises:
        RefusedError: naming the first reason and the way out.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is not False:
        return
    faults = _engine_faults(vllm_config) + _option_faults(config)
    if reasons := [why for wrong, why in faults if wrong]:
        raise RefusedError(*reasons)


def _engine_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    speculative = vllm_config.speculative_config
    method = None if speculative is None else speculative.method
    return [
        (
            vllm_config.parallel_config.pipeline_parallel_size > 1,
            f"{FLAG} is not proven beside pipeline stages; remove it, or use "
            "--tensor-parallel-size instead",
        ),
        (
            method is not None and method not in NO_KV,
            f"{FLAG} is not proven beside speculative decoding by {method}; remove one of them",
        ),
        (
            vllm_config.lora_config is not None,
            f"{FLAG} is not proven beside LoRA adapters; remove one of them",
        ),
        (
            sees_documents_alone(vllm_config.model_config),
            f"{FLAG} is not proven for a model that was trained on documents computed alone "
            "(segreuse.isolated_documents in its config.json); remove it",
        ),
    ]


def _option_faults(config: ServerOptions) -> list[tuple[bool, str]]:
    # Of features that are not imported here: their keys are the configuration's.
    audit = getattr(config, "audit", None)
    return [
        (
            TierServer.of(config).tier is not None,
            f"{FLAG} is not proven beside the second tier; remove it, or tier",
        ),
        (
            getattr(config, "similarity", None) is not None,
            f"{FLAG} is not proven beside similar segments; remove it, or similarity",
        ),
        (
            audit is not None and audit.share > 0,
            f"{FLAG} is not proven beside audits; remove it, or audit.share",
        ),
        (
            getattr(config, "heal_tokens", 0) > 0,
            f"{FLAG} is not proven beside turns that are computed in full later; remove it, or "
            "heal_tokens",
        ),
    ]
