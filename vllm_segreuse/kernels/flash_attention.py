# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that every query of a tile sees, by vLLM's FlashAttention 3.

Where nothing is masked it is the fastest there is on Hopper (docs/gpu-results.md). The keys behind,
which only some of a tile's queries see, are left to the sparse-query kernel, which starts from what
comes back, as in cascade inference (Ye et al. 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_segreuse.kernels.pages import PageLayout, TiledStrides

_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CommonKeys:
    """Tiles as rows of varlen attention, those with most keys first: no program ends late that way.

    Attributes:
        order: the queries, tile by tile, int64 `[queries]`.
        bounds: first of each tile in `order`, and the end, int32 `[tiles + 1]`.
        lengths: keys of each tile, from the first of its request on, int32 `[tiles]`.
        block_tables: int32 `[tiles, blocks]`.
        most_queries, most_keys: of a tile, at most.
    """

    order: torch.Tensor
    bounds: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor
    most_queries: int
    most_keys: int


def supports(layout: PageLayout, dtype: torch.dtype, queries: torch.dtype) -> bool:
    """Whether it runs here, and takes pages of this layout and dtype, and queries of theirs."""
    keys, values = layout.keys, layout.values
    _, size, channels = keys.shape
    return (
        queries == dtype
        and dtype in _DTYPES
        and keys.shape == values.shape
        and all(map(_is_plain, (keys, values)))
        and (size % 16, channels % 8) == (0, 0)
        and channels <= 256
        and find_varlen_attention() is not None
    )


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    values: TiledStrides,
    common: CommonKeys,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each tile to its common keys.

    Args:
        query, pages, keys, values, scale, soft_cap: see `reference.sparse_attention`.
        common: what is attended to.

    Returns:
        For each query of `common.order`, `[queries, heads, channels]` like `query`, and natural
        logarithms of the sums of exponentials, float32 `[heads, queries]`. Neither is defined where
        a tile has no common keys.
    """
    varlen_attention = find_varlen_attention()
    assert varlen_attention is not None
    out, lse = varlen_attention(
        q=query.index_select(0, common.order),
        k=_paged(pages, keys),
        v=_paged(pages, values),
        cu_seqlens_q=common.bounds,
        max_seqlen_q=common.most_queries,
        seqused_k=common.lengths,
        max_seqlen_k=common.most_keys,
        softmax_scale=scale,
        softcap=soft_cap,
        causal=False,
        block_table=common.block_tables,
        return_softmax_lse=True,
        fa_version=3,
    )
    return out, lse


@functools.cache
def find_varlen_attention() -> Callable[..., Any] | None:
    """vLLM's `flash_attn_varlen_func`, where it can run FlashAttention 3."""
    if not torch.cuda.is_available():
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    except ImportError:
        return None
    if not interface.is_fa_version_supported(3):
        return None
    varlen_attention: Callable[..., Any] = interface.flash_attn_varlen_func
    return varlen_attention


def _is_plain(part: TiledStrides) -> bool:
    """Whether a head's channels lie side by side, and its tokens at equal distances."""
    _, size, channels = part.shape
    return part.token_tile == size and part.channel_tile == channels and part.channel_lo == 1


def _paged(pages: torch.Tensor, part: TiledStrides) -> torch.Tensor:
    """`[num_blocks, block_size, kv_heads, channels]`, in place, of a part that is plain."""
    return part.view(pages)[:, :, 0, :, 0].transpose(1, 2)
