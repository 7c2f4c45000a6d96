# SPDX-License-Identifier: Apache-2.0
"""The C++ headers agree with torch: addresses, number formats, rotation."""

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import BITS, DTYPES, assert_same
from tests.kernels.native import compile_host
from tests.prefill.pages import BLOCK_SIZE, HEAD_SIZE, HEADS, LAYOUTS, make_layer, table
from vllm_segreuse.kernels.pages import TiledStrides
from vllm_segreuse.model.kv_layout import discover_layout

SHIM = """
#include "segreuse/address.h"
#include "segreuse/rotate.h"
using namespace segreuse;

template <class Format>
void decode(const void* codes, float* values, long count) {
  const auto* from = static_cast<const typename Format::Code*>(codes);
  for (long i = 0; i < count; ++i) values[i] = Format::decode(from[i]);
}
template <class Format>
void encode(const float* values, void* codes, long count) {
  auto* to = static_cast<typename Format::Code*>(codes);
  for (long i = 0; i < count; ++i) to[i] = Format::encode(values[i]);
}
#define EXPORT extern "C" __attribute__((visibility("default")))
#define FORMAT(name, Format)                                                        \\
  EXPORT void decode_##name(const void* c, float* v, long n) { decode<Format>(c, v, n); } \\
  EXPORT void encode_##name(const float* v, void* c, long n) { encode<Format>(v, c, n); }
FORMAT(float32, Float32)
FORMAT(float16, Float16)
FORMAT(bfloat16, BFloat16)
FORMAT(float8_e4m3fn, Float8E4M3)
FORMAT(float8_e5m2, Float8E5M2)

EXPORT void turn_all(float* first, float* second, const float* cos, const float* sin, long n) {
  for (long i = 0; i < n; ++i) turn(first[i], second[i], cos[i], sin[i]);
}
EXPORT int address(const TiledStrides* strides, int head, int token, int channel) {
  return strides->address(head, token, channel);
}
EXPORT bool in_vectors_of(const TiledStrides* strides, int elements) {
  return strides->in_vectors_of(elements);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("headers")
    (folder / "shim.cpp").write_text(SHIM)
    compile_host(folder / "shim.cpp", folder / "shim.so")
    return ctypes.CDLL(str(folder / "shim.so"))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `kernels.reference.rotate` stores."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_code_is_decoded(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    if size < 4:
        codes = torch.arange(1 << 8 * size).to(BITS[size]).view(dtype)
    else:
        codes = torch.randint(-(1 << 31), 1 << 31, (1 << 18,)).to(torch.int32).view(dtype)
    values = torch.empty(len(codes))
    getattr(shim, f"decode_{name_of(dtype)}")(pointer(codes), pointer(values), len(codes))
    assert_same(values, codes.float())


def awkward_floats(dtype: torch.dtype) -> torch.Tensor:
    """Values around every rounding boundary of a format, random ones, and the special ones."""
    finite = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    if dtype.itemsize == 1:
        finite = torch.arange(256).to(torch.uint8).view(dtype).float()
    elif dtype == torch.bfloat16:
        finite = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    finite = finite[finite.isfinite()].unique()
    boundaries = (finite[1:].double() / 2 + finite[:-1].double() / 2).float()
    exact = torch.cat([finite, boundaries, -boundaries])
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 20,)).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    largest = torch.tensor(torch.finfo(dtype).max) * torch.tensor([0.99, 1.0, 1.01, 1.04, 1.1, 2])
    return torch.cat(
        [
            exact,
            exact.nextafter(torch.tensor(torch.inf)),
            exact.nextafter(torch.tensor(-torch.inf)),
            random,
            torch.randn(1 << 16) * 100,
            torch.randn(1 << 16) * torch.finfo(dtype).tiny,
            special,
            largest,
            -largest,
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_floats_are_rounded_as_torch_does(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = awkward_floats(dtype)
    codes = torch.empty(len(values), dtype=dtype)
    getattr(shim, f"encode_{name_of(dtype)}")(pointer(values), pointer(codes), len(values))
    assert_same(codes, as_stored(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES[3:], ids=name_of)
def test_fp8_saturates(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30, 3.4e38])
    codes = torch.empty(len(values), dtype=dtype)
    getattr(shim, f"encode_{name_of(dtype)}")(pointer(values), pointer(codes), len(values))
    assert codes.float().tolist() == (values.sign() * torch.finfo(dtype).max).tolist()


def test_pairs_turn_as_in_torch(shim: ctypes.CDLL) -> None:
    first, second, angle = torch.randn(3, 1 << 16).unbind()
    cos, sin = angle.cos(), angle.sin()
    expected = first * cos - second * sin, second * cos + first * sin
    first, second = first.clone(), second.clone()
    shim.turn_all(pointer(first), pointer(second), pointer(cos), pointer(sin), len(cos))
    assert_same(first, expected[0])
    assert_same(second, expected[1])


def as_ints(strides: TiledStrides) -> ctypes.Array:
    shape, *rest = vars(strides).values()
    return (ctypes.c_int32 * 11)(*shape, *rest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_are_those_of_the_page(shim: ctypes.CDLL, layout: str) -> None:
    proven = discover_layout(make_layer(layout), BLOCK_SIZE)
    for strides, place in zip((proven.keys, proven.values), LAYOUTS[layout], strict=True):
        numbers = as_ints(strides)
        found = [
            [[shim.address(numbers, h, o, d) for d in range(HEAD_SIZE)] for h in range(HEADS)]
            for o in range(BLOCK_SIZE)
        ]
        assert torch.equal(torch.tensor(found), table(place))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [1, 2, 4, 8, 16])
def test_vectors_are_found_where_elements_lie_side_by_side(
    shim: ctypes.CDLL, layout: str, elements: int
) -> None:
    proven = discover_layout(make_layer(layout), BLOCK_SIZE)
    for strides, place in zip((proven.keys, proven.values), LAYOUTS[layout], strict=True):
        vectors = table(place).view(BLOCK_SIZE, HEADS, -1, elements)
        expected = bool(
            (vectors == vectors[..., :1] + torch.arange(elements)).all()
            and (vectors[..., 0] % elements == 0).all()
        )
        assert bool(shim.in_vectors_of(as_ints(strides), elements) & 1) == expected


ALIGNED = TiledStrides(
    (2, 4, 8),
    offset=16,
    head=64,
    token_tile=2,
    token_hi=32,
    token_lo=16,
    channel_tile=4,
    channel_hi=8,
    channel_lo=1,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"offset": 18}, False),
        ({"head": 66}, False),
        ({"token_hi": 34}, False),
        ({"token_lo": 14}, False),
        ({"channel_tile": 2}, False),
        ({"channel_hi": 10}, False),
        ({"channel_lo": 2}, False),
        # Strides along which there is only one element say nothing.
        ({"shape": (1, 4, 8), "head": 66}, True),
        ({"token_tile": 4, "token_hi": 34}, True),
        ({"token_tile": 1, "token_lo": 14}, True),
        ({"channel_tile": 8, "channel_hi": 10}, True),
        ({"shape": (2, 4, 10), "channel_tile": 10}, False),
    ],
)
def test_every_stride_that_counts_must_be_a_multiple(
    shim: ctypes.CDLL, changes: dict[str, Any], expected: bool
) -> None:
    strides = dataclasses.replace(ALIGNED, **changes)
    assert bool(shim.in_vectors_of(as_ints(strides), 4) & 1) == expected
