# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803 (compile-time arguments of kernels are written in capitals)
"""`carry` in Triton: keys and values of a layer in one launch.

A program changes a few tokens of one head. Each reads the change that it takes part in from where
it is stored; neighbours take part in one and the same, which is then in a cache. Nothing is kept
beside the pages: a program writes its own tokens only, and none of them is a changed one, which
others read.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_segreuse.kernels.arguments import check_carried, check_pages, check_parts
from vllm_segreuse.kernels.pages import Carried, PageLayout, Part, indexable
from vllm_segreuse.kernels.triton_addresses import element
from vllm_segreuse.kernels.triton_formats import STORED_AS, decode, encode

# A program holds so much of a part at once, 16 bytes for each thread and half of the channels that
# turn, and of each element what it was before and after in the token that has changed; but not
# fewer tokens than two for each warp.
_TILE_BYTES = 4096
_MIN_TILE_TOKENS = 8


def supports(layout: PageLayout, dtype: torch.dtype) -> bool:
    """Whether `carry` takes pages of this layout and dtype."""
    return dtype in STORED_AS and layout.keys.shape[0] == layout.values.shape[0]


def carry(
    pages: torch.Tensor,
    parts: Sequence[Part],
    before: Sequence[torch.Tensor],
    carried: Carried,
) -> None:
    """As `reference.carry`.

    Raises:
        ValueError: the arguments are not as described there, or `supports` says no to them.
    """
    if not len(carried):
        return
    _check(pages, parts, before, carried)
    _, fp8_bits = STORED_AS[pages.dtype]
    heads = parts[0].strides.shape[0]
    widest = triton.next_power_of_2(max(part.strides.shape[2] for part in parts))
    block_tokens = max(_MIN_TILE_TOKENS, _TILE_BYTES // (widest * pages.dtype.itemsize))
    # Tokens first: only that dimension of a grid may exceed 65535.
    _carry[(triton.cdiv(len(carried), block_tokens), heads)](
        indexable(pages),
        pages.stride(0),
        indexable(before[0]),
        indexable(before[-1]),
        carried.changed,
        carried.slots,
        carried.rows,
        carried.distances,
        carried.shares,
        carried.cos,
        carried.sin,
        len(carried),
        PARTS=tuple(parts),
        FP8_BITS=fp8_bits,
        BLOCK_TOKENS=block_tokens,
        enable_fp_fusion=False,  # products are rounded as torch rounds them: equal to the last bit
    )


def _check(
    pages: torch.Tensor, parts: Sequence[Part], before: Sequence[torch.Tensor], carried: Carried
) -> None:
    """Raises ValueError."""
    check_pages([pages], tuple(STORED_AS))
    check_parts(parts, pages)
    if len(parts) > 2:
        raise ValueError(f"{len(parts)} parts given; pass the keys, the values, or both")
    heads = [part.strides.shape[0] for part in parts]
    if len(set(heads)) > 1:
        raise ValueError(
            f"parts of {heads[0]} and {heads[1]} heads; pass them in calls of their own"
        )
    check_carried(carried, parts, before, pages)


# Or it would be compiled for several numbers of tokens, and for chunks that begin at odd rows.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["changed"])
def _carry(
    pages,
    page_stride,
    before_first,
    before_last,
    changed,
    slots,
    rows,
    distances,
    shares,
    cos,
    sin,
    num_tokens,
    PARTS: tl.constexpr,
    FP8_BITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid: tiles of tokens, heads."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    head = tl.program_id(1)
    exists = token < num_tokens
    row = tl.load(rows + token, mask=exists, other=-1)
    takes_part = row >= 0
    slot = tl.load(slots + token, mask=takes_part, other=0)
    distance = tl.load(distances + token, mask=takes_part, other=0)
    changed_slot = tl.load(changed + row, mask=takes_part, other=0)
    for number in tl.static_range(len(PARTS)):
        share = tl.load(shares + number * num_tokens + token, mask=takes_part, other=0.0)
        _carry_part(
            pages,
            page_stride,
            before_first if number == 0 else before_last,
            changed_slot,
            slot,
            row,
            distance,
            share,
            cos,
            sin,
            head,
            takes_part,
            PARTS,
            number,
            FP8_BITS,
        )


@triton.jit
def _carry_part(
    pages,
    page_stride,
    before,
    changed_slot,  # [tokens, 1], as all below
    slot,
    row,
    distance,
    share,
    cos,
    sin,
    head,
    takes_part,
    PARTS: tl.constexpr,
    NUMBER: tl.constexpr,
    FP8_BITS: tl.constexpr,
):
    """Keys or values of a tile of tokens, one head.

    Objects among the constants have names before they are passed on: Triton 3.6 takes no others.
    """
    strides: tl.constexpr = PARTS[NUMBER].strides
    rotation: tl.constexpr = PARTS[NUMBER].rotation
    heads: tl.constexpr = strides.shape[0]
    size: tl.constexpr = strides.shape[1]
    channels: tl.constexpr = strides.shape[2]
    held = pages + slot // size * page_stride
    after = pages + changed_slot // size * page_stride
    before += (row * heads + head) * channels
    token, changed_token = slot % size, changed_slot % size
    if rotation is None:
        _add(
            held, after, before, token, changed_token, head, share, takes_part,
            strides, 0, channels, FP8_BITS,
        )  # fmt: skip
    else:
        first: tl.constexpr = rotation.first
        last: tl.constexpr = rotation.first + rotation.dim
        _add(
            held, after, before, token, changed_token, head, share, takes_part,
            strides, 0, first, FP8_BITS,
        )  # fmt: skip
        _add(
            held, after, before, token, changed_token, head, share, takes_part,
            strides, last, channels, FP8_BITS,
        )  # fmt: skip
        pairs: tl.constexpr = rotation.dim // 2
        pair = tl.arange(0, triton.next_power_of_2(pairs))[None, :]
        valid = takes_part & (pair < pairs)
        at = distance * pairs + pair
        cosine = tl.load(cos + at, mask=valid, other=0.0)
        sine = tl.load(sin + at, mask=valid, other=0.0)
        if rotation.neox:
            _add_halves(
                held + element(strides, head, token, first + pair),
                held + element(strides, head, token, first + pairs + pair),
                after + element(strides, head, changed_token, first + pair),
                after + element(strides, head, changed_token, first + pairs + pair),
                before + first + pair,
                before + first + pairs + pair,
                cosine,
                sine,
                share,
                valid,
                FP8_BITS,
            )
        else:
            channel = tl.arange(0, 2 * triton.next_power_of_2(pairs))[None, :]
            _add_neighbours(
                held + element(strides, head, token, first + channel),
                after + element(strides, head, changed_token, first + channel),
                before + first + channel,
                cosine,
                sine,
                share,
                takes_part & (channel < 2 * pairs),
                FP8_BITS,
            )


@triton.jit
def _add(
    held,
    after,
    before,
    token,
    changed_token,
    head,
    share,
    takes_part,
    STRIDES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    FP8_BITS: tl.constexpr,
):
    """Channels `[FIRST, LAST)`, which do not turn."""
    if FIRST < LAST:
        channel = FIRST + tl.arange(0, triton.next_power_of_2(LAST - FIRST))[None, :]
        valid = takes_part & (channel < LAST)
        after += element(STRIDES, head, changed_token, channel)
        moved = _change(after, before + channel, valid, FP8_BITS)
        _take(held + element(STRIDES, head, token, channel), moved, share, valid, FP8_BITS)


@triton.jit
def _add_halves(
    held_first,
    held_second,
    after_first,
    after_second,
    before_first,
    before_second,
    cosine,
    sine,
    share,
    valid,
    FP8_BITS: tl.constexpr,
):
    """Pairs `(i, i + dim/2)`."""
    first = _change(after_first, before_first, valid, FP8_BITS)
    second = _change(after_second, before_second, valid, FP8_BITS)
    _take(held_first, first * cosine - second * sine, share, valid, FP8_BITS)
    _take(held_second, second * cosine + first * sine, share, valid, FP8_BITS)


@triton.jit
def _add_neighbours(held, after, before, cosine, sine, share, valid, FP8_BITS: tl.constexpr):
    """Pairs `(2i, 2i + 1)`: read and written as they lie, taken apart in registers."""
    both = _change(after, before, valid, FP8_BITS)
    tokens: tl.constexpr = both.shape[0]
    pairs: tl.constexpr = both.shape[1] // 2
    first, second = tl.split(tl.reshape(both, (tokens, pairs, 2)))
    turned = tl.join(first * cosine - second * sine, second * cosine + first * sine)
    _take(held, tl.reshape(turned, (tokens, 2 * pairs)), share, valid, FP8_BITS)


@triton.jit
def _change(after, before, valid, FP8_BITS: tl.constexpr):
    """float32 of what is stored now, less what was."""
    now = decode(tl.load(after, mask=valid, other=0), FP8_BITS)
    return now - decode(tl.load(before, mask=valid, other=0), FP8_BITS)


@triton.jit
def _take(held, moved, share, valid, FP8_BITS: tl.constexpr):
    """Add a share of a change, and round."""
    value = decode(tl.load(held, mask=valid, other=0), FP8_BITS) + moved * share
    tl.store(held, encode(value, held.dtype.element_ty, FP8_BITS), mask=valid)
