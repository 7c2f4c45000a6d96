# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys are there twice: as they were computed, and moved.

An anchor is computed behind the text of its chunk. In a prompt that text is gone, and the anchor's
key is turned by RoPE to where it stands then. Its own chunk sees the former, all others the latter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

NAME = "kvlink"
"""Of the attention implementation, for transformers."""

SHORT = 1024
"""Keys of a row, at most, for which scores of all its tokens are held at a time on a CPU."""


def turned(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys `[rows, heads, length, head_dim]` turned by angles `[rows, length, rotary_dim]`.

    Channel pairs are (i, i + half) of the first `rotary_dim` channels; the others stay.
    """
    size = cos.shape[-1]
    part, rest = keys[..., :size], keys[..., size:]
    a, b = part.chunk(2, -1)
    cos, sin = cos[:, None].to(keys.dtype), sin[:, None].to(keys.dtype)
    part = part * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((part, rest), -1)


def products(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as products of whole matrices: for short rows on a CPU several times faster than
    torch's blockwise kernel."""
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(-1, groups * length, size)
    scores = folded @ key.flatten(0, 1).transpose(1, 2)
    scores = scores.view(rows, heads, length, -1) * (scaling or size**-0.5)
    weights = (scores.float() + attention_mask).softmax(-1).to(value.dtype)
    found = weights.view(-1, groups * length, weights.shape[-1]) @ value.flatten(0, 1)
    return found.view(rows, heads, length, size).transpose(1, 2), None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    inner: str,
    moved: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers.

    Args:
        attention_mask: over all keys, twice the length if there are `moved` ones.
        inner: the implementation that does the work.
        moved: cosine and sine of how far each key is moved; None: there are no anchors.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if moved is not None:
        key = torch.cat((key, turned(key, *moved)), -2)
        value = torch.cat((value, value), -2)
    is_short = query.device.type == "cpu" and key.shape[-2] <= SHORT
    work = products if is_short else ALL_ATTENTION_FUNCTIONS[inner]
    result: tuple[Tensor, Tensor | None] = work(
        module, query, key, value, attention_mask, **options
    )
    return result


def register(inner: str = "sdpa") -> None:
    """Make `attn_implementation="kvlink"` known.

    Args:
        inner: the implementation that does the work.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, partial(attend, inner=inner))


def angles(model: Any, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine by which keys are turned that move by `shift` positions.

    Args:
        model: causal language model of transformers.
        shift: int64 `[rows, length]`.

    Raises:
        ValueError: the model keeps its rotary embedding elsewhere than usual.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        raise ValueError(f"{type(model).__name__} has no rotary_emb: documents cannot be moved")
    cos, sin = rotary(torch.zeros(1, device=shift.device), shift)
    scale = getattr(rotary, "attention_scaling", 1.0)  # is in the keys already
    return cos / scale, sin / scale
