# SPDX-License-Identifier: Apache-2.0
"""Pages as scales and codes of one byte, in plain torch: what the C++ version is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_segreuse.kernels.codecs import LARGEST, Codec, EncodedPage
from vllm_segreuse.kernels.page_tokens import pick_tokens, read_tokens, write_tokens
from vllm_segreuse.kernels.pages import Part

_CODES = {Codec.INT8: torch.int8, Codec.FP8: torch.float8_e4m3fn}


def encode(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    codec: Codec,
    blocks: torch.Tensor,
    cells: Sequence[torch.Tensor],
    rows: torch.Tensor,
) -> torch.Tensor:
    """Store pages as scales and codes, from which `align` can read tokens.

    A scale is the smallest float16 with which the largest of its elements has a code. A code is
    that of the element times the scale's reciprocal in float32, rounded to nearest even. Elements
    of a scale 0 are 0.

    Args:
        pages: flat pages `[num_blocks, page_elements]` of each layer, of one floating-point dtype
            and one layout.
        parts: the keys and the values of a page.
        codec: `INT8` or `FP8`.
        blocks: which pages, int64 `[blocks]`.
        cells: where each layer's are stored, uint8 `[rows, EncodedPage.size]`.
        rows: where each is stored, int64 `[blocks]`; none twice.

    Returns:
        Which blocks were encoded, bool `[blocks]`. Those with NaN, with an infinity, or with
        numbers that decoding could make infinite are not: their rows are undefined.
    """
    encoded = torch.ones(len(blocks), dtype=torch.bool, device=blocks.device)
    for layer, cell in zip(pages, cells, strict=True):
        encoded &= _encode_layer(layer, parts, codec, blocks, cell, rows)
    return encoded


def _encode_layer(
    pages: torch.Tensor,
    parts: Sequence[Part],
    codec: Codec,
    blocks: torch.Tensor,
    cells: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    keys, values = (part.strides.shape for part in parts)
    place = EncodedPage.of(keys, values, pages.shape[1])
    made = torch.zeros(len(blocks), place.size, dtype=torch.uint8, device=pages.device)
    codes = made[:, place.codes : place.codes + pages.shape[1]]
    slots = torch.arange(len(blocks) * keys[1], device=pages.device)
    encoded = torch.ones(len(blocks), dtype=torch.bool, device=pages.device)
    for part, over, first in zip(parts, (1, 3), (0, place.value_scales), strict=True):
        heads, tokens, channels = part.strides.shape
        elements = part.strides.tokens_of(pages, blocks).float()
        elements = elements.view(-1, tokens, heads, channels)
        scale = _rounded_up(elements.abs().amax(over, keepdim=True) / LARGEST[codec])
        largest = scale.float() * LARGEST[codec]
        encoded &= (largest <= torch.finfo(pages.dtype).max).flatten(1).all(1)
        reciprocal = torch.where(scale > 0, 1 / scale.float(), 0.0)
        numbers = elements * reciprocal
        rounded = numbers.round().nan_to_num() if codec is Codec.INT8 else numbers
        coded = rounded.to(_CODES[codec]).view(torch.uint8)
        write_tokens(codes, part.strides, slots, coded.view(-1, heads, channels))
        scales = scale.transpose(1, 2).reshape(len(blocks), -1).view(torch.uint8)
        made[:, first : first + scales.shape[1]] = scales
    cells[rows] = made  # all of them: to pick some, a GPU would have to be waited for
    return encoded


def decoded(
    cells: torch.Tensor,
    parts: Sequence[Part],
    page_elements: int,
    codec: Codec,
    slots: torch.Tensor,
) -> list[torch.Tensor]:
    """Keys and values at the given slots, float32 `[tokens, heads, head_size]` each: codes times
    scales.

    Args:
        cells: uint8 `[rows, EncodedPage.size]` of one layer.
    """
    keys, values = (part.strides.shape for part in parts)
    place = EncodedPage.of(keys, values, page_elements)
    codes = cells[:, place.codes : place.codes + page_elements].view(_CODES[codec])
    row, token = slots // keys[1], slots % keys[1]
    key_scales = cells[row, : place.value_scales].view(torch.float16)
    end = place.value_scales + 2 * values[0] * values[1]
    value_scales = cells[row, place.value_scales : end].view(torch.float16)
    value_scales = value_scales.view(-1, values[0], values[1])
    scales = (
        key_scales.view(-1, keys[0], keys[2]),
        value_scales[torch.arange(len(slots), device=slots.device), :, token, None],
    )
    read = reader(slots.device)
    return [
        read(codes, part.strides, slots).float() * scale.float()
        for part, scale in zip(parts, scales, strict=True)
    ]


def reader(device: torch.device) -> Callable[..., torch.Tensor]:
    """What reads tokens there: which pages they are in, a GPU would have to be waited for."""
    return read_tokens if device.type == "cpu" else pick_tokens


def _rounded_up(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest float16 that are not below these numbers, none of which is negative."""
    nearest = numbers.half()
    return torch.where(
        nearest.float() < numbers, (nearest.view(torch.int16) + 1).view(torch.float16), nearest
    )
