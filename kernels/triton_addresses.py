# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Where page elements lie, for all Triton kernels."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def element(strides: tl.constexpr, head, token, channel):
    """Where `(head, token, channel)` lies in a page; the formula of `TiledStrides`.

    The strides are compile-time values: they fold into the addresses and show the compiler which
    accesses are contiguous. A division is left out where one tile spans the whole extent.
    """
    at = strides.offset + head * strides.head
    if strides.token_tile == strides.shape[1]:
        at += token * strides.token_lo
    else:
        at += token // strides.token_tile * strides.token_hi
        at += token % strides.token_tile * strides.token_lo
    if strides.channel_tile == strides.shape[2]:
        at += channel * strides.channel_lo
    else:
        at += channel // strides.channel_tile * strides.channel_hi
        at += channel % strides.channel_tile * strides.channel_lo
    return at
