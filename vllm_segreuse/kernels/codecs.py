# SPDX-License-Identifier: Apache-2.0
"""How pages lie in a host region: as they are, or in half the bytes.

No torch here: the scheduler's process has to know the sizes, too.

`int8` and `fp8` (e4m3) store a byte for each element and scales in float16: of keys one for each
channel, whose sizes differ most, of values one for each token (as KIVI does, arXiv:2402.02750).
`reference_codecs.py` says how numbers are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Shape = tuple[int, int, int]
"""Heads, tokens and channels of the keys or the values of a page."""

_SCALE_BYTES = 2
_LINE_BYTES = 64


class Codec(StrEnum):
    """How a page is stored."""

    RAW = "raw"
    INT8 = "int8"
    FP8 = "fp8"


LARGEST = {Codec.INT8: 127.0, Codec.FP8: 448.0}
"""Of the numbers that have a code, the largest."""


@dataclass(frozen=True)
class EncodedPage:
    """Where things lie in a page of scales and codes, in bytes from its first.

    Scales of keys come first, `[heads, channels]`; those of values are `[heads, tokens]`. The code
    of element i of the page is byte i of the codes.
    """

    value_scales: int
    codes: int
    size: int

    @classmethod
    def of(cls, keys: Shape, values: Shape, page_elements: int) -> EncodedPage:
        """For pages of so many elements; codes begin with a line of the caches, and so does what
        follows them."""
        value_scales = keys[0] * keys[2] * _SCALE_BYTES
        codes = _whole_lines(value_scales + values[0] * values[1] * _SCALE_BYTES)
        return cls(value_scales, codes, _whole_lines(codes + page_elements))


def stored_bytes(
    codec: Codec, keys: Shape, values: Shape, page_elements: int, element_bytes: int
) -> int:
    """Of one page of one layer."""
    if codec is Codec.RAW:
        return page_elements * element_bytes
    return EncodedPage.of(keys, values, page_elements).size


def _whole_lines(count: int) -> int:
    return -(-count // _LINE_BYTES) * _LINE_BYTES
