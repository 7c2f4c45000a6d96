# SPDX-License-Identifier: Apache-2.0
"""Where a key or value element lies in a KV page, found by writing through the backend itself.

Backends pack pages differently (vLLM's CPU backend transposes keys per tile of tokens, AMX
interleaves pairs of channels, GPU backends choose NHD or HND). No layout is assumed here: known
values are written through the backend's own `do_kv_cache_update`, located in the page, and
expressed as strides over `(head, token // a, token % a, channel // b, channel % b)`. A page that
cannot be expressed so is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from vllm_segreuse.kernels.pages import PageLayout, TiledStrides
from vllm_segreuse.model import token_kv
from vllm_segreuse.model.kv_format import is_fp8, kv_scales, stored_dtype, typed_pages

# Integers below these are exact, and not rounded to others once a quarter is added.
_BASES = {torch.float8_e4m3fn: 16, torch.float8_e5m2: 8}
_BASE = 128  # of bf16, fp16 and fp32


class PageLayoutError(RuntimeError):
    """The KV page layout of a layer could not be proven."""


def discover_layout(layer: torch.nn.Module, block_size: int) -> PageLayout:
    """Find the page layout of an attention layer by writing one page through its backend.

    Uses block 1 as scratch (block 0 is vLLM's null block); its content is restored.

    Args:
        layer: a vLLM attention layer whose `kv_cache` is bound.
        block_size: tokens per page.

    Raises:
        LayoutError: naming the layer, if the page cannot be located or expressed as strides.
    """
    try:
        pages = typed_pages(layer)
    except ValueError as error:
        raise PageLayoutError(f"{layer.layer_name}: {error}") from None
    saved = pages[1].clone()
    try:
        key_at, value_at = _locate(layer, pages, block_size)
    finally:
        pages[1].copy_(saved)
    try:
        together = None
        if token_kv.is_latent(layer):
            together = _fit(np.concatenate([value_at, key_at], axis=2))
        return PageLayout(_fit(key_at), _fit(value_at), together)
    except PageLayoutError as error:
        raise PageLayoutError(f"{layer.layer_name}: {error}") from None


def _locate(
    layer: torch.nn.Module, pages: torch.Tensor, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Page element index of every K and V element, each `[head, token, channel]`.

    Every element gets a number; its digits are written one after the other (each digit exact in the
    cache's dtype), and read back from the raw page.
    """
    shapes = [(tokens, *of(layer)) for of in (token_kv.key_shape, token_kv.value_shape)]
    sizes = [math.prod(shape) for shape in shapes]
    count = sum(sizes)
    numbers = [
        part.view(shape)
        for part, shape in zip(torch.arange(1, count + 1).split(sizes), shapes, strict=True)
    ]
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64, device=pages.device)
    found = torch.zeros(pages.shape[1], dtype=torch.int64)
    base, unit = _BASES.get(pages.dtype, _BASE), 1
    while unit <= count:
        pages[1].zero_()
        written = _written_as(layer, [(part // unit) % base for part in numbers])
        token_kv.write(layer, *written, slots)
        found += pages[1].to("cpu", torch.float32).to(torch.int64) * unit
        unit *= base
    where = np.full(count + 1, -1, dtype=np.int64)
    raw = found.numpy()
    inside = np.flatnonzero((raw > 0) & (raw <= count))
    where[raw[inside]] = inside
    if (where[1:] < 0).any():  # each place holds one number, so no two are at the same
        raise PageLayoutError(
            f"{layer.layer_name}: values written by the backend are not in its page"
        )
    keys, values = (
        where[part.numpy()].transpose(1, 0, 2)  # from [token, head, channel]
        for part in numbers
    )
    return keys, values


def _written_as(
    layer: torch.nn.Module, digits: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backend has to be given as keys and as values for it to store these digits.

    Some backends cut fp8 off (vLLM's on CPUs), others round it: a quarter more is stored as the
    digit, or as less than the next, by both, whatever the division by the scale adds or takes.
    """
    if not is_fp8(stored_dtype(layer)):
        cache = layer.kv_cache
        keys, values = (part.to(cache.device, cache.dtype) for part in digits)
        return keys, values
    scales = kv_scales(layer)
    keys, values = (
        ((half + 0.25) * scale).to(layer.kv_cache.device, layer.dtype)
        for half, scale in zip(digits, (scales.key, scales.value), strict=True)
    )
    return keys, values


def _fit(located: np.ndarray) -> TiledStrides:
    """Express element positions `[head, token, channel]` as `TiledStrides`, exactly."""
    shape = located.shape
    offset = int(located[0, 0, 0])
    head = int(located[1, 0, 0]) - offset if shape[0] > 1 else 0
    by_head = head * np.arange(shape[0]).reshape(-1, 1, 1)
    for token_tile, token_hi, token_lo, by_token in _tilings(located[0, :, 0]):
        for channel_tile, channel_hi, channel_lo, by_channel in _tilings(located[0, 0, :]):
            if (offset + by_head + by_token.reshape(-1, 1) + by_channel == located).all():
                return TiledStrides(
                    shape,
                    offset,
                    head,
                    token_tile,
                    token_hi,
                    token_lo,
                    channel_tile,
                    channel_hi,
                    channel_lo,
                )
    raise PageLayoutError("the page layout is not a tiling by tokens and channels")


def _tilings(line: np.ndarray) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Tile size, strides of tiles and within them, and offsets, of each tiling that has this line.

    The other tilings fit no page with this line: of a whole page no more are compared.
    """
    at = np.arange(len(line))
    for tile in _tiles(len(line)):
        high, low = _step(line, tile), _step(line, 1)
        offsets = at // tile * high + at % tile * low
        if (line[0] + offsets == line).all():
            yield tile, high, low, offsets


def _tiles(extent: int) -> list[int]:
    """Candidate tile sizes, the whole extent first (the simplest description wins)."""
    return [extent] + [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t < extent and extent % t == 0]


def _step(line: np.ndarray, distance: int) -> int:
    return int(line[distance] - line[0]) if distance < len(line) else 0
