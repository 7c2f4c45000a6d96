# SPDX-License-Identifier: Apache-2.0
"""vLLM's rotary modules, each as a table of cosines and sines and as a function that rotates by it;
both in float32, where the module's own table is in the model's dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)

MODULES = (RotaryEmbeddingBase, Phi3LongRoPEScaledRotaryEmbedding)


@dataclass(frozen=True)
class Rotary:
    """A rotary module.

    Attributes:
        table: float32 `[positions, rotary_dim]`: cosines by position, then sines.
        neox: see `DeltaRope`.
        rotate: from positions `[tokens]` and keys `[tokens, heads * head_size]` to rotated keys.
    """

    table: torch.Tensor
    neox: bool
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def read(module: torch.nn.Module) -> Rotary:
    """Read a module of vLLM's.

    Raises:
        AttributeError, TypeError, ValueError, RuntimeError: it is none of those known.
    """
    if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
        return _read_long(module)
    table = module._compute_cos_sin_cache().detach().to("cpu", torch.float32)
    unrounded = copy.deepcopy(module).to("cpu")
    unrounded.cos_sin_cache = table

    def rotate(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        heads = keys
        if isinstance(module, DeepseekScalingRotaryEmbedding):  # takes its heads apart only
            heads = keys.view(len(keys), -1, module.head_size)
        return unrounded.forward_native(positions, heads.clone(), heads.clone())[1].view_as(keys)

    return Rotary(table, bool(module.is_neox_style), rotate)


def _read_long(module: Phi3LongRoPEScaledRotaryEmbedding) -> Rotary:
    """LongRoPE has factors for short and for long prompts. vLLM takes one of these for all prompts,
    by `max_model_len`, so that the keys of a prompt stay right while it grows."""
    if module.use_long_rope:
        factors = module.max_position_embeddings, module.long_factor, module.long_mscale
    else:
        short = module.short_factor, module.short_mscale
        factors = module.original_max_position_embeddings, *short
    table = module._compute_cos_sin_cache(*factors).to("cpu", torch.float32)
    unrounded = copy.deepcopy(module).to("cpu")
    unread = torch.zeros(module.original_max_position_embeddings, table.shape[1])
    rows = [unread, table] if module.use_long_rope else [table]
    unrounded.long_short_cos_sin_cache = torch.cat(rows)

    def rotate(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rotated = unrounded(positions, keys.clone(), keys.clone())[1]
        assert rotated is not None
        return rotated

    return Rotary(table, True, rotate)
