# SPDX-License-Identifier: Apache-2.0
"""What is not proven beside pipeline stages, refused at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from segreuse_extras.transfer.options import TransferServer
from vllm_segreuse.engine.stage import layers_of_stages
from vllm_segreuse.engine.supported import RefusedError, num_sharing
from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.model.documents import sees_documents_alone
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.plan import ModelLayers, Program, Segments
from vllm_segreuse.policies import POLICIES, Situation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN_EARLY = True
"""The configuration tells all of it: a model need not be loaded, nor a tokenizer."""

_TOKENS, _NEW_TOKENS, _BLOCK_SIZE = 4096, 256, 16


def check(vllm_config: VllmConfig, config: ServerOptions) -> None:
    """Refuse what contradicts several pipeline stages.

    Raises:
        RefusedError: naming the first reason and the way out.
    """
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return
    faults = _engine_faults(vllm_config) + _option_faults(vllm_config, config)
    if reasons := [why for wrong, why in faults if wrong]:
        raise RefusedError(*reasons)


def _engine_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    method = None if speculative is None else speculative.method
    by = f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    return [
        (
            vllm_config.use_v2_model_runner,
            f"{by} is not proven with vLLM's Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            parallel.distributed_executor_backend == "external_launcher",
            f"{by} is not proven with --distributed-executor-backend external_launcher; use mp",
        ),
        (
            parallel.data_parallel_size > 1,
            f"{by} is not proven beside data_parallel_size={parallel.data_parallel_size}; use 1, "
            "and a router in front of several servers",
        ),
        (
            vllm_config.lora_config is not None,
            f"{by} is not proven beside LoRA adapters; remove --enable-lora, or use "
            "--tensor-parallel-size instead",
        ),
        (
            speculative is not None,
            f"{by} is not proven beside speculative decoding by {method}; remove "
            "--speculative-config, or use --tensor-parallel-size instead",
        ),
        (
            model.is_multimodal_model,
            f"{by} is not proven for a model that takes images; use --tensor-parallel-size instead",
        ),
        (
            model.use_mla,
            f"{by} is not proven for multi-head latent attention (MLA); use --tensor-parallel-size "
            "instead",
        ),
        (
            num_sharing(model) > 0,
            f"{by} is not proven for a model with layers that share the KV of others; use "
            "--tensor-parallel-size instead",
        ),
        (
            bool(getattr(model.hf_text_config, "hidden_size_per_layer_input", 0)),
            f"{by} is not proven for a model that gives each layer an input of its own for each "
            "token; use --tensor-parallel-size instead",
        ),
        (
            model.using_transformers_backend(),
            f"{by} is not proven for a model that vLLM runs by its Transformers backend; use "
            "--tensor-parallel-size instead",
        ),
        (
            model.enable_sleep_mode,
            f"{by} is not proven beside sleep mode; remove --enable-sleep-mode",
        ),
        (
            sees_documents_alone(model),
            f"{by} is not proven for a model that was trained on documents computed alone "
            "(segreuse.isolated_documents in its config.json); use --tensor-parallel-size instead",
        ),
    ]


def _option_faults(vllm_config: VllmConfig, config: ServerOptions) -> list[tuple[bool, str]]:
    by = f"pipeline_parallel_size={vllm_config.parallel_config.pipeline_parallel_size}"
    layers = ModelLayers.of_full_attention(vllm_config.model_config.get_total_num_hidden_layers())
    first = len(layers_of_stages(vllm_config)[0])
    needed = _program(config, layers).layers_before_choice(layers)
    # Of features that are not imported here: their keys are the configuration's.
    audit = getattr(config, "audit", None)
    return [
        (
            TierServer.of(config).tier is not None,
            f"{by} is not proven beside the second tier; remove tier",
        ),
        (
            TransferServer.of(config).beside is not None,
            f"{by} is not proven beside a transfer connector; remove beside",
        ),
        (
            getattr(config, "similarity", None) is not None,
            f"{by} is not proven beside similar segments; remove similarity",
        ),
        (
            audit is not None and audit.share > 0,
            f"{by} is not proven beside audits; remove audit.share",
        ),
        (
            needed > first,
            f"{by} leaves {first} of {layers.count} layers to the first stage, and policy: "
            f"{config.policy} needs {needed} to choose tokens (dense_layers: "
            f"{config.dense_layers}); set policy to focus, epic, shift or exact, or to sparsex or "
            "cacheblend with fewer dense_layers",
        ),
    ]


def _program(options: PolicyOptions, layers: ModelLayers) -> Program:
    """By which the server's own policy computes a prompt that is reused but for its end."""
    reused = np.ones(_TOKENS, dtype=np.bool_)
    reused[-_NEW_TOKENS:] = False
    elsewhere = np.full(1, _TOKENS, np.int32)
    situation = Situation(
        reused,
        Segments.elsewhere(np.zeros(1, np.int32), elsewhere),
        _BLOCK_SIZE,
        layers.count,
        options.recompute_ratio,
        options.dense_layers,
        options.overflow_tokens,
    )
    return POLICIES[options.policy](situation).program
