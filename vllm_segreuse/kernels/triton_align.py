# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803 (compile-time arguments of kernels are written in capitals)
"""`align` in Triton: every layer in one launch, or in two where pages are both read and written.

A program moves a few tokens of one head of one layer, keys and values. A tensor holds the
addresses of the layers. The time goes into memory traffic: each element is read and written once
(twice with a scratch buffer), 16 bytes at a time where the layout allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_segreuse.kernels.arguments import (
    check_moves,
    check_pages,
    check_parts,
    check_sources,
)
from vllm_segreuse.kernels.pages import Moves, PageLayout, Part, Rotation, TiledStrides
from vllm_segreuse.kernels.scratch import layers_at_once
from vllm_segreuse.kernels.triton_addresses import element
from vllm_segreuse.kernels.triton_formats import STORED_AS, decode, encode

# A program holds this many elements at once, 32 in each of its 128 threads; but not fewer tokens
# than let threads have whole vectors of 16 bytes of the few channels that turn in MLA.
_TILE_ELEMENTS = 4096
_MIN_TILE_TOKENS = 16


def supports(layout: PageLayout, dtype: torch.dtype) -> bool:
    """Whether `align` takes pages of this layout and dtype."""
    return dtype in STORED_AS and layout.keys.shape[0] == layout.values.shape[0]


@dataclass(frozen=True)
class Transfer:
    """Keys or values on their way: how they lie before and after, and which channels turn."""

    source: TiledStrides
    target: TiledStrides
    rotation: Rotation | None


class _End(NamedTuple):
    """Where tokens come from or go to.

    Attributes:
        bases: address of each layer, int64.
        slots: of each token, int64.
        page_stride: elements from page to page.
        alignment: bytes, of every base.
    """

    bases: torch.Tensor
    slots: torch.Tensor
    page_stride: int
    alignment: int


def align(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    sources: Sequence[torch.Tensor] | None = None,
) -> None:
    """As `reference.align`; in addition, with `moves.overlapping` and no `sources`, tokens are
    turned on their way into a scratch buffer and written from there, as many layers at a time as it
    holds.

    Raises:
        ValueError: the arguments are not as described, or `supports` says no to them.
    """
    if not len(moves) or not pages:
        return
    read = _check(pages, parts, moves, sources)
    dtype = pages[0].dtype
    if not moves.overlapping or sources is not None:
        transfers = tuple(Transfer(part.strides, part.strides, part.rotation) for part in parts)
        source, target = _in_cache(read, moves.sources), _in_cache(pages, moves.targets)
        _launch(transfers, dtype, moves, source, target)
        return
    # A scratch row is a page of one token, so both launches are the same kernel.
    rows = _row_strides(parts)
    row_elements = sum(heads * channels for heads, _, channels in (row.shape for row in rows))
    layer_bytes = triton.cdiv(len(moves) * row_elements * dtype.itemsize, 16) * 16
    together = layers_at_once(len(pages), layer_bytes)
    device = pages[0].device
    scratch = torch.empty(together * layer_bytes, dtype=torch.uint8, device=device)
    numbers = torch.arange(len(moves), device=device)
    inward = tuple(
        Transfer(part.strides, row, part.rotation) for part, row in zip(parts, rows, strict=True)
    )
    outward = tuple(
        Transfer(row, part.strides, None) for part, row in zip(parts, rows, strict=True)
    )
    for first in range(0, len(pages), together):
        layers = pages[first : first + together]
        bases = torch.arange(len(layers), device=device) * layer_bytes + scratch.data_ptr()
        staged = _End(bases, numbers, row_elements, 16)
        _launch(inward, dtype, moves, _in_cache(layers, moves.sources), staged)
        _launch(outward, dtype, moves, staged, _in_cache(layers, moves.targets))


def _check(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    sources: Sequence[torch.Tensor] | None,
) -> Sequence[torch.Tensor]:
    """Raises ValueError; returns where tokens are read."""
    check_pages(pages, tuple(STORED_AS))
    check_parts(parts, pages[0])
    for part in parts:
        if part.strides.shape[0] != parts[0].strides.shape[0]:
            raise ValueError(
                f"parts of {part.strides.shape[0]} and {parts[0].strides.shape[0]} heads; pass "
                "them in calls of their own"
            )
    read = check_sources(sources, pages)
    check_moves(moves, parts, pages[0], read[0])
    return read


def _row_strides(parts: Sequence[Part]) -> list[TiledStrides]:
    """A token's parts behind each other, dense."""
    rows, offset = [], 0
    for heads, _, channels in (part.strides.shape for part in parts):
        rows.append(TiledStrides((heads, 1, channels), offset, channels, 1, 0, 0, channels, 0, 1))
        offset += heads * channels
    return rows


def _in_cache(pages: Sequence[torch.Tensor], slots: torch.Tensor) -> _End:
    addresses = tuple(layer.data_ptr() for layer in pages)
    aligned = all(address % 16 == 0 for address in addresses)
    return _End(
        _on_device(addresses, pages[0].device),
        slots,
        pages[0].stride(0),
        16 if aligned else pages[0].itemsize,
    )


@lru_cache(maxsize=64)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 `[layers]`. Remembered, as a model's cache does not move."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _launch(
    transfers: tuple[Transfer, ...],
    dtype: torch.dtype,
    moves: Moves,
    source: _End,
    target: _End,
) -> None:
    stored, fp8_bits = STORED_AS[dtype]
    heads = transfers[0].source.shape[0]
    widest = max(transfer.source.shape[2] for transfer in transfers)
    block_tokens = max(_MIN_TILE_TOKENS, _TILE_ELEMENTS // triton.next_power_of_2(widest))
    # Tokens first: only that dimension of a grid may exceed 65535.
    _move[(triton.cdiv(len(moves), block_tokens), source.bases.numel(), heads)](
        *source[:3],
        *target[:3],
        moves.angles,
        moves.cos,
        moves.sin,
        len(moves),
        TRANSFERS=transfers,
        STORED=stored,
        FP8_BITS=fp8_bits,
        SOURCE_ALIGNMENT=source.alignment,
        TARGET_ALIGNMENT=target.alignment,
        BLOCK_TOKENS=block_tokens,
        enable_fp_fusion=False,  # products are rounded as torch rounds them: equal to the last bit
    )


@triton.jit(do_not_specialize=["num_tokens"])  # or it would be compiled for several kinds of them
def _move(
    source_bases,
    source_slots,
    source_page_stride,
    target_bases,
    target_slots,
    target_page_stride,
    angles,
    cos,
    sin,
    num_tokens,
    TRANSFERS: tl.constexpr,
    STORED: tl.constexpr,
    FP8_BITS: tl.constexpr,
    SOURCE_ALIGNMENT: tl.constexpr,
    TARGET_ALIGNMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid: tiles of tokens, layers, heads."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    layer, head = tl.program_id(1), tl.program_id(2)
    exists = token < num_tokens
    source_slot = tl.load(source_slots + token, mask=exists, other=0)
    target_slot = tl.load(target_slots + token, mask=exists, other=0)
    angle = tl.load(angles + token, mask=exists, other=0)
    source = tl.load(source_bases + layer).to(tl.pointer_type(STORED))
    target = tl.load(target_bases + layer).to(tl.pointer_type(STORED))
    # The compiler sees the alignment of arguments, not that of what is read from memory.
    source = tl.multiple_of(source, SOURCE_ALIGNMENT)
    target = tl.multiple_of(target, TARGET_ALIGNMENT)
    for number in tl.static_range(len(TRANSFERS)):
        _move_part(
            source,
            source_slot,
            source_page_stride,
            target,
            target_slot,
            target_page_stride,
            head,
            exists,
            cos,
            sin,
            angle,
            TRANSFERS,
            number,
            FP8_BITS,
        )


@triton.jit
def _move_part(
    source,  # pages of one layer
    source_slot,  # [tokens, 1]
    source_page_stride,
    target,
    target_slot,
    target_page_stride,
    head,
    exists,
    cos,
    sin,
    angle,
    TRANSFERS: tl.constexpr,
    NUMBER: tl.constexpr,
    FP8_BITS: tl.constexpr,
):
    """Keys or values of a tile of tokens, one head.

    Objects among the constants have names before they are passed on: Triton 3.6 takes no others.
    """
    before: tl.constexpr = TRANSFERS[NUMBER].source
    after: tl.constexpr = TRANSFERS[NUMBER].target
    rotation: tl.constexpr = TRANSFERS[NUMBER].rotation
    source_size: tl.constexpr = before.shape[1]
    target_size: tl.constexpr = after.shape[1]
    size: tl.constexpr = before.shape[2]
    source += source_slot // source_size * source_page_stride
    target += target_slot // target_size * target_page_stride
    source_token = source_slot % source_size
    target_token = target_slot % target_size
    if rotation is None:
        _copy(source, target, source_token, target_token, head, exists, before, after, 0, size)
    else:
        first: tl.constexpr = rotation.first
        last: tl.constexpr = rotation.first + rotation.dim
        _copy(source, target, source_token, target_token, head, exists, before, after, 0, first)
        _copy(source, target, source_token, target_token, head, exists, before, after, last, size)
        pairs: tl.constexpr = rotation.dim // 2
        pair = tl.arange(0, triton.next_power_of_2(pairs))[None, :]
        valid = exists & (pair < pairs)
        at = angle * pairs + pair
        cosine = tl.load(cos + at, mask=valid, other=0.0)
        sine = tl.load(sin + at, mask=valid, other=0.0)
        if rotation.neox:
            _turn_halves(
                source + element(before, head, source_token, first + pair),
                source + element(before, head, source_token, first + pairs + pair),
                target + element(after, head, target_token, first + pair),
                target + element(after, head, target_token, first + pairs + pair),
                cosine,
                sine,
                valid,
                FP8_BITS,
            )
        else:
            channel = tl.arange(0, 2 * triton.next_power_of_2(pairs))[None, :]
            _turn_neighbours(
                source + element(before, head, source_token, first + channel),
                target + element(after, head, target_token, first + channel),
                cosine,
                sine,
                exists & (channel < 2 * pairs),
                FP8_BITS,
            )


@triton.jit
def _copy(
    source,
    target,
    source_token,
    target_token,
    head,
    exists,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Channels `[FIRST, LAST)`, bit for bit."""
    if FIRST < LAST:
        channel = FIRST + tl.arange(0, triton.next_power_of_2(LAST - FIRST))[None, :]
        valid = exists & (channel < LAST)
        stored = tl.load(source + element(SOURCE, head, source_token, channel), mask=valid, other=0)
        tl.store(target + element(TARGET, head, target_token, channel), stored, mask=valid)


@triton.jit
def _turn_halves(
    source_first,
    source_second,
    target_first,
    target_second,
    cosine,
    sine,
    valid,
    FP8_BITS: tl.constexpr,
):
    """Pairs `(i, i + dim/2)`."""
    first = decode(tl.load(source_first, mask=valid, other=0), FP8_BITS)
    second = decode(tl.load(source_second, mask=valid, other=0), FP8_BITS)
    stored: tl.constexpr = target_first.dtype.element_ty
    new_first = first * cosine - second * sine
    new_second = second * cosine + first * sine
    tl.store(target_first, encode(new_first, stored, FP8_BITS), mask=valid)
    tl.store(target_second, encode(new_second, stored, FP8_BITS), mask=valid)


@triton.jit
def _turn_neighbours(source, target, cosine, sine, valid, FP8_BITS: tl.constexpr):
    """Pairs `(2i, 2i + 1)`: read and written as they lie, taken apart in registers."""
    both = decode(tl.load(source, mask=valid, other=0), FP8_BITS)
    tokens: tl.constexpr = both.shape[0]
    pairs: tl.constexpr = both.shape[1] // 2
    first, second = tl.split(tl.reshape(both, (tokens, pairs, 2)))
    turned = tl.join(first * cosine - second * sine, second * cosine + first * sine)
    turned = tl.reshape(turned, (tokens, 2 * pairs))
    tl.store(target, encode(turned, target.dtype.element_ty, FP8_BITS), mask=valid)
