# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803 (compile-time arguments of kernels are written in capitals)
"""The number formats of KV pages, for all Triton kernels.

fp8 is taken apart and put together by hand: sm_80 has no instructions for it, and so it rounds and
saturates alike everywhere.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

STORED_AS = {
    torch.float32: (tl.float32, 0),
    torch.float16: (tl.float16, 0),
    torch.bfloat16: (tl.bfloat16, 0),
    torch.float8_e4m3fn: (tl.uint8, 3),
    torch.float8_e5m2: (tl.uint8, 2),
}
"""How elements are stored, and how many mantissa bits fp8 has (0: not fp8)."""

_READ_AS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.int8}


def readable(pages: torch.Tensor) -> torch.Tensor:
    """The same pages in a type that Triton loads everywhere, and that `in_type` takes."""
    return pages.view(_READ_AS.get(pages.dtype, pages.dtype))


@triton.jit
def in_type(loaded, TYPE: tl.constexpr):
    """Elements of `readable` pages in the type of the queries, without rounding."""
    if loaded.dtype == tl.uint8:
        value = decode(loaded, 3).to(TYPE)
    elif loaded.dtype == tl.int8:
        value = decode(loaded, 2).to(TYPE)
    else:
        value = loaded
    return value


@triton.jit
def decode(stored, FP8_BITS: tl.constexpr):
    """float32 of what is stored."""
    if FP8_BITS == 0:
        value = stored.to(tl.float32)
    elif FP8_BITS == 2:  # e5m2 is the upper half of a float16
        value = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # e4m3fn moved into a float16 is too small by the difference of their biases, 2 ** 8
        code = stored.to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def encode(value, STORED: tl.constexpr, FP8_BITS: tl.constexpr):
    """What is stored of float32: rounded to nearest even, and in fp8 never beyond the largest."""
    if FP8_BITS == 0:
        stored = value.to(STORED)
    else:
        bias: tl.constexpr = 15 if FP8_BITS == 2 else 7
        largest: tl.constexpr = 57344.0 if FP8_BITS == 2 else 448.0
        dropped: tl.constexpr = 23 - FP8_BITS
        magnitude = tl.minimum(tl.abs(value), largest)
        bits = magnitude.to(tl.int32, bitcast=True)
        bits += ((bits >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
        normal = (bits >> dropped) - ((127 - bias) << FP8_BITS)
        # Beside `unit`, one step of float32 is one step of fp8 numbers without leading one.
        unit: tl.constexpr = 2.0 ** (1 - bias + dropped)
        tiny = (magnitude + unit).to(tl.int32, bitcast=True) - ((128 - bias + dropped) << 23)
        code = tl.where(magnitude < 2.0 ** (1 - bias), tiny, normal)
        code = tl.where(value != value, 0x7F, code)
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        stored = (code | sign).to(STORED)
    return stored
