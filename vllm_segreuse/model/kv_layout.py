# SPDX-License-Identifier: Apache-2.0
"""Where a key or value element lies in a KV page, found by writing through the backend itself.

Backends pack pages differently (vLLM's CPU backend transposes keys per tile of tokens, AMX
interleaves pairs of channels, GPU backends choose NHD or HND). No layout is assumed here: known
values are written through the backend's own `do_kv_cache_update`, located in the page, and
expressed as strides over `(head, token // a, token % a, channel // b, channel % b)`. A page that
cannot be expressed so is refused.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_segreuse.kernels.pages import PageLayout, TiledStrides
from vllm_segreuse.model.kv_format import is_fp8, kv_scales, stored_dtype, typed_pages

# Integers below these are exact, and not rounded to others once a quarter is added.
_BASES = {torch.float8_e4m3fn: 16, torch.float8_e5m2: 8}
_BASE = 128  # of bf16, fp16 and fp32


class LayoutError(RuntimeError):
    """The KV page layout of a layer could not be proven."""


def discover_layout(layer: torch.nn.Module, block_size: int) -> PageLayout:
    """Find the page layout of an attention layer by writing one page through its backend.

    Uses block 1 as scratch (block 0 is vLLM's null block); its content is restored.

    Args:
        layer: a vLLM `Attention` layer whose `kv_cache` is bound.
        block_size: tokens per page.

    Raises:
        LayoutError: naming the layer, if the page cannot be located or expressed as strides.
    """
    try:
        pages = typed_pages(layer)
    except ValueError as error:
        raise LayoutError(f"{layer.layer_name}: {error}") from None
    shape = (layer.num_kv_heads, block_size, layer.head_size)
    saved = pages[1].clone()
    try:
        key_at, value_at = _locate(layer, pages, shape)
    finally:
        pages[1].copy_(saved)
    try:
        return PageLayout(_fit(key_at, shape), _fit(value_at, shape))
    except LayoutError as error:
        raise LayoutError(f"{layer.layer_name}: {error}") from None


def _locate(
    layer: torch.nn.Module, pages: torch.Tensor, shape: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Page element index of every K and V element, each `[head, token, channel]`.

    Every element gets a number; its digits are written one after the other (each digit exact in the
    cache's dtype), and read back from the raw page.
    """
    heads, tokens, channels = shape
    count = heads * tokens * channels
    numbers = torch.arange(1, 2 * count + 1, dtype=torch.int64).view(2, tokens, heads, channels)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64, device=pages.device)
    found = torch.zeros(pages.shape[1], dtype=torch.int64)
    base, unit = _BASES.get(pages.dtype, _BASE), 1
    while unit <= 2 * count:
        keys, values = _written_as(layer, (numbers // unit) % base)
        pages[1].zero_()
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        found += pages[1].to("cpu", torch.float32).to(torch.int64) * unit
        unit *= base
    where = np.full(2 * count + 1, -1, dtype=np.int64)
    raw = found.numpy()
    inside = np.flatnonzero((raw > 0) & (raw <= 2 * count))
    where[raw[inside]] = inside
    if (where[1:] < 0).any() or len(np.unique(where[1:])) != 2 * count:
        raise LayoutError(f"{layer.layer_name}: values written by the backend are not in its page")
    located = where[1:].reshape(2, tokens, heads, channels).transpose(0, 2, 1, 3)
    return located[0], located[1]


def _written_as(layer: torch.nn.Module, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backend has to be given as keys and values for it to store these digits, `[2, ...]`.

    Some backends cut fp8 off (vLLM's on CPUs), others round it: a quarter more is stored as the
    digit, or as less than the next, by both, whatever the division by the scale adds or takes.
    """
    if not is_fp8(stored_dtype(layer)):
        keys, values = digits.to(layer.kv_cache.device, layer.kv_cache_torch_dtype)
        return keys, values
    scales = kv_scales(layer)
    keys, values = (
        ((half + 0.25) * scale).to(layer.kv_cache.device, layer.dtype)
        for half, scale in zip(digits, (scales.key, scales.value), strict=True)
    )
    return keys, values


def _fit(located: np.ndarray, shape: tuple[int, int, int]) -> TiledStrides:
    """Express element positions `[head, token, channel]` as `TiledStrides`, exactly."""
    heads, tokens, channels = shape
    offset = int(located[0, 0, 0])
    head = int(located[1, 0, 0]) - offset if heads > 1 else 0
    h = np.arange(heads).reshape(-1, 1, 1)
    o = np.arange(tokens).reshape(1, -1, 1)
    d = np.arange(channels).reshape(1, 1, -1)
    for token_tile in _tiles(tokens):
        for channel_tile in _tiles(channels):
            strides = TiledStrides(
                shape,
                offset,
                head,
                token_tile,
                _step(located[0, :, 0], token_tile),
                _step(located[0, :, 0], 1),
                channel_tile,
                _step(located[0, 0, :], channel_tile),
                _step(located[0, 0, :], 1),
            )
            expected = (
                offset
                + h * head
                + o // token_tile * strides.token_hi
                + o % token_tile * strides.token_lo
                + d // channel_tile * strides.channel_hi
                + d % channel_tile * strides.channel_lo
            )
            if (expected == located).all():
                return strides
    raise LayoutError("the page layout is not a tiling by tokens and channels")


def _tiles(extent: int) -> list[int]:
    """Candidate tile sizes, the whole extent first (the simplest description wins)."""
    return [extent] + [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t < extent and extent % t == 0]


def _step(line: np.ndarray, distance: int) -> int:
    return int(line[distance] - line[0]) if distance < len(line) else 0
