# SPDX-License-Identifier: Apache-2.0
"""Tokens of flat pages by slot, in plain torch."""

from __future__ import annotations

import torch

from vllm_segreuse.kernels.pages import TiledStrides, indexable


def read_tokens(pages: torch.Tensor, strides: TiledStrides, slots: torch.Tensor) -> torch.Tensor:
    """Tokens `[tokens, heads, head_size]` at the given slots."""
    # Whole pages are gathered (one memcpy each) and unpacked at once; picking single tokens out of
    # tiled pages would be a strided read per element.
    size = strides.shape[1]
    blocks, page_of = torch.unique(slots // size, return_inverse=True)
    tokens = indexable(strides.tokens_of(pages, blocks))[page_of * size + slots % size]
    return tokens.view(pages.dtype)


def pick_tokens(pages: torch.Tensor, strides: TiledStrides, slots: torch.Tensor) -> torch.Tensor:
    """The same for a few tokens: element by element, and without waiting for the device."""
    heads, _, channels = strides.shape
    tokens = _tiles(indexable(pages), strides)[_tile_of(strides, slots)]
    return tokens.reshape(-1, heads, channels).view(pages.dtype)


def write_tokens(
    pages: torch.Tensor, strides: TiledStrides, slots: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Write tokens `[tokens, heads, head_size]` to the given slots."""
    heads, _, channels = strides.shape
    _tiles(indexable(pages), strides)[_tile_of(strides, slots)] = indexable(tokens).view(
        -1, heads, channels // strides.channel_tile, strides.channel_tile
    )


def _tiles(pages: torch.Tensor, strides: TiledStrides) -> torch.Tensor:
    """`[pages, token tiles, tokens of a tile, heads, channel tiles, channels of a tile]`."""
    return strides.view(pages).permute(0, 2, 3, 1, 4, 5)


def _tile_of(strides: TiledStrides, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where a slot's token lies in the first three dimensions of `_tiles`."""
    size, tile = strides.shape[1], strides.token_tile
    offset = slots % size
    return slots // size, offset // tile, offset % tile
