# SPDX-License-Identifier: Apache-2.0
"""How keys and values lie in the pages of a KV cache, and which of their channels turn."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class TiledStrides:
    """Element strides of one half (K or V) of a page.

    Element `(head h, token o, channel d)` lies at
    `offset + h*head + (o//token_tile)*token_hi + (o%token_tile)*token_lo
    + (d//channel_tile)*channel_hi + (d%channel_tile)*channel_lo`.
    """

    shape: tuple[int, int, int]  # (num_kv_heads, block_size, head_size)
    offset: int
    head: int
    token_tile: int
    token_hi: int
    token_lo: int
    channel_tile: int
    channel_hi: int
    channel_lo: int

    def view(self, pages: torch.Tensor) -> torch.Tensor:
        """Strided view `[block, head, token_hi, token_lo, channel_hi, channel_lo]` of flat pages.

        Args:
            pages: `[num_blocks, page_elements]`, unit stride in the page.
        """
        heads, tokens, channels = self.shape
        size = (
            pages.shape[0],
            heads,
            tokens // self.token_tile,
            self.token_tile,
            channels // self.channel_tile,
            self.channel_tile,
        )
        stride = (
            pages.stride(0),
            self.head,
            self.token_hi,
            self.token_lo,
            self.channel_hi,
            self.channel_lo,
        )
        return pages.as_strided(size, stride, pages.storage_offset() + self.offset)

    def tokens(self, pages: torch.Tensor) -> torch.Tensor:
        """Copy out every token of the given pages: `[blocks * block_size, heads, head_size]`."""
        heads, tokens, channels = self.shape
        unpacked = self.view(pages).permute(0, 2, 3, 1, 4, 5)
        return unpacked.reshape(pages.shape[0] * tokens, heads, channels)

    def tokens_of(self, pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The same for some blocks, int64 `[blocks]`."""
        return self.tokens(indexable(pages)[blocks]).view(pages.dtype)


@dataclass(frozen=True)
class PageLayout:
    """Layout of one KV page, over its flat elements.

    Attributes:
        keys, values: of each KV head; in a latent page the key that turns, and the latent vector.
        latent: in a latent page both of them, the vector first; None elsewhere.
    """

    keys: TiledStrides
    values: TiledStrides
    latent: TiledStrides | None = None

    @property
    def attended(self) -> TiledStrides:
        """What queries are multiplied by."""
        return self.latent or self.keys


@dataclass(frozen=True)
class Rotation:
    """The channels of a head that turn with the position.

    Attributes:
        dim: how many, even. The pairs' angles are columns 0 ... dim/2 - 1 of the tables.
        neox: pairs are `(i, i + dim/2)` if true, `(2i, 2i + 1)` otherwise, counted from `first`.
        first: the first of them.
    """

    dim: int
    neox: bool
    first: int = 0


@dataclass(frozen=True)
class Part:
    """Keys or values of a page; `rotation` is None for what moves unchanged."""

    strides: TiledStrides
    rotation: Rotation | None


@dataclass(frozen=True)
class Moves:
    """Tokens to copy from slot to slot, and how far each is turned.

    All tensors on the pages' device.

    Attributes:
        sources: slots to read (`block * block_size + offset`), int64 `[tokens]`.
        targets: slots to write, int64 `[tokens]`; none twice.
        angles: row of `cos` and `sin` for each token, int64 `[tokens]`.
        cos, sin: float32 `[distinct, pairs]`, C-contiguous.
        overlapping: whether a page may be both read and written.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    angles: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    overlapping: bool = True

    def __len__(self) -> int:
        return self.sources.numel()


class Share(NamedTuple):
    """Of a token's change, what its neighbours take part in.

    Attributes:
        common: at any distance.
        near: what is added right beside it, and fades.
        reach: in how many tokens, to a third (1 / e).
    """

    common: float
    near: float
    reach: float

    def at(self, distance: torch.Tensor) -> torch.Tensor:
        """Of tokens so far away, float32."""
        return self.common + self.near * torch.exp(-distance / self.reach)


@dataclass(frozen=True)
class Carried:
    """Tokens that take part in what has changed of others.

    All tensors on the pages' device, contiguous.

    Attributes:
        changed: slots of the changed tokens, int64 `[rows]`.
        slots: of the tokens, int64 `[tokens]`; none twice, and none that is changed.
        rows: of the changed tokens, int64 `[tokens]`; -1: the token takes part in no change.
        distances: from the changed token, as numbers of the tables' rows, int64 `[tokens]`.
        shares: of the change of keys and of values, float32 `[parts, tokens]`.
        cos, sin: of what a key turns by over a distance, float32 `[distances, pairs]`.
    """

    changed: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    distances: torch.Tensor
    shares: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __len__(self) -> int:
        return self.slots.numel()

    @functools.cached_property
    def by_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, transposed: `[pairs, distances]`."""
        return self.cos.T.contiguous(), self.sin.T.contiguous()


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in a type that torch can index everywhere: bytes instead of fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def flat_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """`[num_blocks, page_elements]` view of a layer's cache; the page must be dense in memory.

    Raises:
        ValueError: if it is not.
    """
    order = sorted(range(1, kv_cache.dim()), key=kv_cache.stride, reverse=True)
    expected = 1
    for dim in reversed(order):
        if kv_cache.stride(dim) != expected and kv_cache.shape[dim] != 1:
            raise ValueError(
                f"KV pages are not dense in memory (shape {tuple(kv_cache.shape)}, "
                f"strides {kv_cache.stride()})"
            )
        expected *= kv_cache.shape[dim]
    return kv_cache.as_strided(
        (kv_cache.shape[0], expected), (kv_cache.stride(0), 1), kv_cache.storage_offset()
    )
