# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803 (compile-time arguments of kernels are written in capitals)
"""Where page elements lie, for all Triton kernels."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def element(STRIDES: tl.constexpr, head, token, channel):
    """Where `(head, token, channel)` lies in a page; the formula of `TiledStrides`.

    The strides are compile-time values: they fold into the addresses and show the compiler which
    accesses are contiguous. A division is left out where one tile spans the whole extent.
    """
    at = STRIDES.offset + head * STRIDES.head
    if STRIDES.token_tile == STRIDES.shape[1]:
        at += token * STRIDES.token_lo
    else:
        at += token // STRIDES.token_tile * STRIDES.token_hi
        at += token % STRIDES.token_tile * STRIDES.token_lo
    if STRIDES.channel_tile == STRIDES.shape[2]:
        at += channel * STRIDES.channel_lo
    else:
        at += channel // STRIDES.channel_tile * STRIDES.channel_hi
        at += channel % STRIDES.channel_tile * STRIDES.channel_lo
    return at


@triton.jit
def load_tokens(
    pages,
    page_stride,
    block_table,
    token,
    end,
    head,
    PART: tl.constexpr,
    CHANNELS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Tokens at positions `token` of a request, one head: `[tokens, CHANNELS]`.

    `CHANNELS` is the head size rounded up to a power of two; the channels added are zero. With
    `BOUNDED`, tokens from `end` on are zero too, and neither table nor pages are read there.
    """
    size: tl.constexpr = PART.shape[1]
    channel = tl.arange(0, CHANNELS)[None, :]
    if BOUNDED:
        page = tl.load(block_table + token // size, mask=token < end, other=0)
    else:
        page = tl.load(block_table + token // size)
    at = (page.to(tl.int64) * page_stride)[:, None]
    at += element(PART, head, (token % size)[:, None], channel)
    if BOUNDED:
        valid = (token < end)[:, None] & (channel < PART.shape[2])
        tokens = tl.load(pages + at, mask=valid, other=0.0)
    elif PART.shape[2] < CHANNELS:
        tokens = tl.load(pages + at, mask=channel < PART.shape[2], other=0.0)
    else:
        tokens = tl.load(pages + at)
    return tokens
