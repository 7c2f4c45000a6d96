# SPDX-License-Identifier: Apache-2.0
"""Attention layers as far as their KV pages go: every way of packing a page, written naively."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

HEADS, BLOCK_SIZE, HEAD_SIZE = 2, 64, 32

# A place of one element in a page: (head, token, channel) -> index. V lies behind K.
Place = Callable[[int, int, int], int]
HALF = HEADS * BLOCK_SIZE * HEAD_SIZE


def _tiled_by_channel(h: int, o: int, d: int, tile: int) -> int:
    """Keys of vLLM's CPU backend: `[head, token tile, channel, token]`."""
    return ((h * (BLOCK_SIZE // tile) + o // tile) * HEAD_SIZE + d) * tile + o % tile


def _key_pairs(h: int, o: int, d: int) -> int:
    """Keys for AMX: as above, pairs of channels side by side."""
    tile = (h * (BLOCK_SIZE // 16) + o // 16) * HEAD_SIZE * 16
    return tile + (d // 2) * 32 + (o % 16) * 2 + d % 2


def _value_pairs(h: int, o: int, d: int) -> int:
    """Values for AMX: pairs of tokens side by side, in tiles of 16 channels."""
    tile = (h * (HEAD_SIZE // 16) + d // 16) * BLOCK_SIZE * 16
    return tile + (o // 2) * 32 + (d % 16) * 2 + o % 2


def _nhd(h: int, o: int, d: int) -> int:
    return (o * HEADS + h) * HEAD_SIZE + d


def _hnd(h: int, o: int, d: int) -> int:
    return (h * BLOCK_SIZE + o) * HEAD_SIZE + d


LAYOUTS: dict[str, tuple[Place, Place]] = {
    "NHD": (_nhd, lambda *at: HALF + _nhd(*at)),
    "HND": (_hnd, lambda *at: HALF + _hnd(*at)),
    "K beside V": (
        lambda h, o, d: 2 * _hnd(h, o, 0) + d,
        lambda h, o, d: 2 * _hnd(h, o, 0) + HEAD_SIZE + d,
    ),
    "K and V interleaved": (lambda *at: 2 * _nhd(*at), lambda *at: 2 * _nhd(*at) + 1),
    "tiled by 32": (
        lambda h, o, d: _tiled_by_channel(h, o, d, 32),
        lambda *at: HALF + _hnd(*at),
    ),
    "tiled by 16": (
        lambda h, o, d: _tiled_by_channel(h, o, d, 16),
        lambda *at: HALF + _hnd(*at),
    ),
    "pairs": (_key_pairs, lambda *at: HALF + _value_pairs(*at)),
}


def table(place: Place) -> torch.Tensor:
    """int64 `[token, head, channel]` of what `place` says."""
    return torch.tensor(
        [
            [[place(h, o, d) for d in range(HEAD_SIZE)] for h in range(HEADS)]
            for o in range(BLOCK_SIZE)
        ]
    )


@dataclass
class Layer:
    """What `discover_layout` and `Aligner` need of a vLLM `Attention` layer.

    Attributes:
        pages: `[blocks, elements of K and V]`.
        key_at: int64 `[token, head, channel]`, indices into a page.
        value_at: the same for values.
        log: what happened to the cache, in order.
    """

    pages: torch.Tensor
    key_at: torch.Tensor
    value_at: torch.Tensor
    layer_name: str = "model.layers.3.attn"
    num_kv_heads: int = HEADS
    head_size: int = HEAD_SIZE
    kv_cache_dtype: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0
    log: list[str] = field(default_factory=list)

    def set_scales(self, key: float, value: float) -> None:
        """Of numbers in fp8."""
        self._k_scale_float, self._v_scale_float = key, value

    @property
    def kv_cache(self) -> torch.Tensor:
        return self.pages.view(len(self.pages), HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)

    @property
    def kv_cache_torch_dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def impl(self) -> SimpleNamespace:
        return SimpleNamespace(do_kv_cache_update=self.write)

    def write(
        self,
        layer: "Layer",
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self.log.append("write")
        for k, v, slot in zip(key, value, slots.tolist(), strict=True):
            page, token = self.pages[slot // BLOCK_SIZE], slot % BLOCK_SIZE
            page[self.key_at[token]] = self.stored(k, self._k_scale_float)
            page[self.value_at[token]] = self.stored(v, self._v_scale_float)

    def stored(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        """What a backend makes of keys or values."""
        return numbers.to(self.pages.dtype)

    def read(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value `[head, channel]` of one slot."""
        page, token = self.pages[slot // BLOCK_SIZE], slot % BLOCK_SIZE
        return page[self.key_at[token]].clone(), page[self.value_at[token]].clone()


def make_layer(layout: str, num_blocks: int = 3, dtype: torch.dtype = torch.float32) -> Layer:
    """A layer with a random cache."""
    key, value = LAYOUTS[layout]
    pages = torch.randn(num_blocks, 2 * HALF).to(dtype)
    return Layer(pages, table(key), table(value))
