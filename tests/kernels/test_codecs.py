# SPDX-License-Identifier: Apache-2.0
"""Pages as scales and codes: how large errors may be, what is refused, and the library's bits."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import (
    CASES,
    Cache,
    assert_same,
    copy_of,
    hnd,
    make_cache,
    make_loads,
    make_region,
    nhd,
    pairs_of,
    parts_of,
    shape_of,
)
from tests.kernels.test_cpu_align import Piece, moves_of, pieces
from vllm_segreuse.kernels import cpu, cpu_store, page_tokens, reference, reference_codecs
from vllm_segreuse.kernels.codecs import LARGEST, Codec, EncodedPage, stored_bytes
from vllm_segreuse.kernels.pages import Moves, Part, Rotation
from vllm_segreuse.kernels.reference_codecs import decoded, encode

from hypothesis import given, settings, strategies as st  # isort: skip

CODECS = pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8], ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = hnd(2, 16, 32)
STILL = parts_of(SHAPE, None)
needs_library = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def make_cells(parts: list[Part], page_elements: int, rows: int, layers: int = 1) -> Cache:
    """Random bytes."""
    keys, values = (part.strides.shape for part in parts)
    size = EncodedPage.of(keys, values, page_elements).size
    return make_region(size, rows, torch.float8_e5m2, layers, start=8)


def as_bytes(cells: Cache) -> list[torch.Tensor]:
    return [cell.view(torch.uint8) for cell in cells.layers]


def round_trip(
    pages: torch.Tensor, codec: Codec, parts: list[Part] = STILL
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of two blocks before and after, float32 `[tokens, heads, channels]`."""
    [cell] = as_bytes(make_cells(parts, pages.shape[1], 5))
    rows = torch.tensor([4, 1])
    assert encode([pages], parts, codec, torch.arange(2), [cell], rows).all()
    size = parts[0].strides.shape[1]
    slots = (rows[:, None] * size + torch.arange(size)).flatten()
    after = decoded(cell, parts, pages.shape[1], codec, slots)
    return [part.strides.tokens(pages[:2]).float() for part in parts], after


def as_scale(numbers: torch.Tensor) -> torch.Tensor:
    """What the next float16 is at most."""
    return torch.maximum(numbers * (1 + 2.0**-10), numbers + 2.0**-24)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype, magnitude: float) -> None:
    """A step is 1/127 of the largest in the key's channel, or in the value's token."""
    pages = (magnitude * torch.randn(2, SHAPE.page_elements)).to(dtype)
    before, after = round_trip(pages, Codec.INT8)
    for old, new, over in zip(before, after, (1, 3), strict=True):
        old, new = old.view(2, 16, 2, 32), new.view(2, 16, 2, 32)
        step = as_scale(old.abs().amax(over, keepdim=True) / 127)
        assert ((old - new).abs() <= step * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_off_by_a_sixteenth_at_most(dtype: torch.dtype, magnitude: float) -> None:
    """Or by half of the smallest code's distance, 1/512 of a scale."""
    pages = (magnitude * torch.randn(2, SHAPE.page_elements)).to(dtype)
    before, after = round_trip(pages, Codec.FP8)
    for old, new, over in zip(before, after, (1, 3), strict=True):
        old, new = old.view(2, 16, 2, 32), new.view(2, 16, 2, 32)
        scale = as_scale(old.abs().amax(over, keepdim=True) / 448)
        assert ((old - new).abs() <= torch.maximum(old.abs() / 16, scale / 1024) * (1 + 1e-5)).all()


@CODECS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_was_decoded_has_the_same_codes(dtype: torch.dtype, codec: Codec) -> None:
    pages = torch.randn(2, SHAPE.page_elements).to(dtype)
    [cell] = as_bytes(make_cells(STILL, SHAPE.page_elements, 2))
    two = torch.arange(2)
    encode([pages], STILL, codec, two, [cell], two)
    nothing = torch.zeros(32, dtype=torch.int64)
    moves = Moves(torch.arange(32), torch.arange(32), nothing, torch.zeros(1, 0), torch.zeros(1, 0))
    again = cell.clone()
    reference.align([pages], STILL, moves, [cell], codec)
    encode([pages], STILL, codec, two, [again], two)
    codes = EncodedPage.of(SHAPE.keys.shape, SHAPE.keys.shape, SHAPE.page_elements).codes
    assert torch.equal(again[:, codes:], cell[:, codes:])
    if dtype is torch.float32:
        assert torch.equal(again, cell)


@CODECS
def test_what_is_zero_stays_zero(codec: Codec) -> None:
    """Channels of keys, tokens of values, and whole pages; nothing is divided by zero."""
    pages = torch.randn(2, SHAPE.page_elements)
    SHAPE.keys.view(pages)[0, :, :, :, 0, 7] = 0
    assert SHAPE.values is not None
    SHAPE.values.view(pages)[0, 1, 0, 3] = 0
    pages[1] = 0
    before, after = round_trip(pages, codec)
    for old, new in zip(before, after, strict=True):
        assert (new[old == 0] == 0).all()
        assert new.isfinite().all()
        assert (old[new == 0].abs() < 0.02).all()


@CODECS
@pytest.mark.parametrize("smallest", [2.0**-24, 2.0**-30, 1e-40])
def test_tiny_numbers_are_rounded_within_the_smallest_scale(codec: Codec, smallest: float) -> None:
    pages = smallest * torch.randn(2, SHAPE.page_elements).clamp(-1, 1)
    for old, new in zip(*round_trip(pages, codec), strict=True):
        assert ((old - new).abs() <= 2.0**-24).all()


def test_sizes_are_those_of_the_specification() -> None:
    """Qwen3-8B: 36 layers of 8 heads, 16 tokens, 128 channels."""
    shape = (8, 16, 128)
    raw, int8, fp8 = (
        36 * stored_bytes(codec, shape, shape, 2 * math.prod(shape), 2)
        for codec in (Codec.RAW, Codec.INT8, Codec.FP8)
    )
    assert (raw, int8, fp8) == (2_359_296, 1_262_592, 1_262_592)
    odd = EncodedPage.of((3, 16, 36), (3, 16, 36), 3456)
    assert odd == EncodedPage(216, 320, 3776)


REFUSED_NUMBERS = [
    (torch.float32, math.nan),
    (torch.float32, math.inf),
    (torch.float32, -1e8),
    (torch.bfloat16, math.nan),
    (torch.bfloat16, -math.inf),
    (torch.bfloat16, 1e8),
    (torch.float16, math.nan),
    (torch.float16, 65504.0),
]


@CODECS
@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize(("dtype", "number"), REFUSED_NUMBERS, ids=str)
def test_numbers_without_a_code_are_reported(
    built: str, dtype: torch.dtype, number: float, half: int, codec: Codec
) -> None:
    """In any layer; the other blocks are encoded."""
    pages = make_cache(SHAPE.page_elements, 4, dtype, num_layers=2)
    pages.layers[1][2, half * SHAPE.page_elements // 2 + 100] = number
    for function in (encode, cpu_store.encode):
        cells = make_cells(STILL, SHAPE.page_elements, 6, 2)
        blocks, rows = torch.tensor([3, 2, 0]), torch.tensor([5, 0, 1])
        found = function(pages.layers, STILL, codec, blocks, as_bytes(cells), rows)
        assert found.tolist() == [True, False, True]


@CODECS
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case.values, DTYPES[number % 3]) for number, case in enumerate(CASES)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_the_library_has_the_references_bits(
    built: str, case: tuple[Any, ...], dtype: torch.dtype, codec: Codec
) -> None:
    name, rotation = case
    shape = shape_of(name)
    parts = parts_of(shape, rotation)
    pages = make_cache(shape.page_elements, 5, dtype, num_layers=2)
    pages.memory[: pages.memory.numel() // 4] *= 1e-4
    pages.layers[0][1] = 0
    cells = make_cells(parts, shape.page_elements, 7, 2)
    blocks, rows = torch.tensor([4, 0, 1, 2]), torch.tensor([2, 6, 0, 5])
    expected = copy_of(cells)
    assert encode(pages.layers, parts, codec, blocks, as_bytes(expected), rows).all()
    assert cpu_store.encode(pages.layers, parts, codec, blocks, as_bytes(cells), rows).all()
    found, wanted = (cache.memory.view(torch.uint8) for cache in (cells, expected))
    wanted = keep_gaps(wanted, found, expected, parts, shape.page_elements)
    assert torch.equal(found, wanted)

    moves = make_loads(7, 5, shape.keys.shape[1], 13, pairs_of(parts))
    token = torch.randint(0, shape.keys.shape[1], (13,))
    moves = dataclasses.replace(
        moves, sources=rows[torch.randint(0, 4, (13,))] * shape.keys.shape[1] + token
    )
    assert_decodes(pages, parts, moves, cells, codec)


def keep_gaps(
    wanted: torch.Tensor, found: torch.Tensor, cells: Cache, parts: list[Part], page_elements: int
) -> torch.Tensor:
    """Bytes between scales and codes, and behind codes, belong to nobody."""
    keys, values = (part.strides.shape for part in parts)
    place = EncodedPage.of(keys, values, page_elements)
    scales = place.value_scales + 2 * values[0] * values[1]
    wanted = wanted.clone()
    for cell in as_bytes(cells):
        for first, last in ((scales, place.codes), (place.codes + page_elements, place.size)):
            there = (len(cell), last - first), cell.stride(), cell.storage_offset() + first
            wanted.as_strided(*there).copy_(found.as_strided(*there))
    return wanted


def assert_decodes(
    pages: Cache, parts: list[Part], moves: Moves, cells: Cache, codec: Codec
) -> None:
    mine, expected = copy_of(pages), copy_of(pages)
    cpu.align(mine.layers, parts, moves, as_bytes(cells), codec)
    reference.align(expected.layers, parts, moves, as_bytes(cells), codec)
    assert not torch.equal(expected.memory, pages.memory)
    assert_same(mine.memory, expected.memory)


@settings(max_examples=8)
@given(
    made=pieces(),
    rotation=st.sampled_from([Rotation(32, True), Rotation(32, False), Rotation(8, True, 8), None]),
    dtype=st.sampled_from(DTYPES),
)
@CODECS
@pytest.mark.parametrize("layout", ["tiled by 32", "tiled by 16", "pairs", "NHD", "HND"])
def test_runs_of_tokens_are_decoded_as_by_the_reference(
    built: str,
    layout: str,
    codec: Codec,
    made: list[Piece],
    rotation: Rotation | None,
    dtype: torch.dtype,
) -> None:
    shape = shape_of(layout)
    parts = parts_of(shape, rotation)
    pages = make_cache(shape.page_elements, 12, dtype, num_layers=2, gap=32, start=32)
    cells = make_cells(parts, shape.page_elements, 12, 2)
    every = torch.arange(12)
    assert cpu_store.encode(pages.layers, parts, codec, every, as_bytes(cells), every).all()
    pages.memory.zero_()
    assert_decodes(pages, parts, moves_of(made, rotation, False), cells, codec)


@CODECS
def test_work_is_shared_out_among_threads(built: str, threads: int, codec: Codec) -> None:
    shape = shape_of("tiled by 32")
    parts = parts_of(shape, Rotation(32, True))
    pages = make_cache(shape.page_elements, 12, torch.bfloat16, num_layers=5)
    cells, expected = (make_cells(parts, shape.page_elements, 12, 5) for _ in range(2))
    every = torch.arange(12)
    cpu_store.encode(pages.layers, parts, codec, every, as_bytes(cells), every.flip(0))
    encode(pages.layers, parts, codec, every, as_bytes(expected), every.flip(0))
    for found, wanted in zip(as_bytes(cells), as_bytes(expected), strict=True):
        assert torch.equal(found, wanted)
    assert_decodes(pages, parts, make_loads(12, 12, 64, 384, 16), cells, codec)


def good_call() -> tuple[Any, ...]:
    """Arguments of `encode`."""
    shape = nhd(2, 16, 32)
    pages = make_cache(shape.page_elements, 4, torch.float16, num_layers=3)
    parts = parts_of(shape, Rotation(32, True))
    cells = as_bytes(make_cells(parts, shape.page_elements, 4, 3))
    return pages.layers, parts, Codec.INT8, torch.arange(2), cells, torch.arange(2)


REFUSED: dict[str, tuple[Callable[..., tuple[Any, ...]], str]] = {
    "fp8": (
        lambda p, *rest: ([x.to(torch.float8_e4m3fn) for x in p], *rest),
        "pages of torch.float8_e4m3fn are stored by the codec raw alone, not int8",
    ),
    "one part": (lambda p, a, *rest: (p, a[:1], *rest), "1 parts given; the codec int8 stores"),
    "layers": (lambda p, a, k, b, c, r: (p, a, k, b, c[:2], r), "of 2 layers given, pages of 3"),
    "size": (
        lambda p, a, k, b, c, r: (p, a, k, b, [x[:, 64:] for x in c], r),
        "encoded pages have 2176 bytes on cpu; expected 2240 on cpu",
    ),
    "dtype": (
        lambda p, a, k, b, c, r: (p, a, k, b, [x.view(torch.int8) for x in c], r),
        "pages are torch.int8; the kernel knows torch.uint8",
    ),
    "blocks": (lambda p, a, k, b, c, r: (p, a, k, b + 3, c, r), "blocks are from 3 to 4"),
    "rows": (lambda p, a, k, b, c, r: (p, a, k, b, c, r - 1), "rows are from -1 to 0"),
}


@needs_library
def test_the_encoding_that_is_spoiled_below_is_good() -> None:
    assert cpu_store.encode(*good_call()).all()
    pages, parts, codec, _, cells, _ = good_call()
    nothing = torch.zeros(0, dtype=torch.int64)
    assert cpu_store.encode(pages, parts, codec, nothing, cells, nothing).shape == (0,)


@needs_library
@pytest.mark.parametrize("name", REFUSED)
def test_encodings_that_do_not_fit_are_refused(name: str) -> None:
    spoil, message = REFUSED[name]
    arguments = spoil(*good_call())
    before = [cell.clone() for cell in arguments[4]]
    with pytest.raises(ValueError, match=message):
        cpu_store.encode(*arguments)
    assert all(map(torch.equal, arguments[4], before))


@needs_library
def test_alignments_from_encoded_pages_that_do_not_fit_are_refused() -> None:
    pages, parts, codec, _, cells, _ = good_call()
    moves = make_loads(4, 4, 16, 9, 16)
    cpu.align(pages, parts, moves, cells, codec)
    with pytest.raises(ValueError, match="encoded pages of no layers given"):
        cpu.align(pages, parts, moves, None, codec)
    with pytest.raises(ValueError, match="sources are from"):
        cpu.align(pages, parts, moves, [cell[:1] for cell in cells], codec)


def test_every_code_of_fp8_is_decoded(built: str) -> None:
    """Also those of numbers without leading one; NaN has none."""
    parts = parts_of(SHAPE, None)
    [cell] = as_bytes(make_cells(parts, SHAPE.page_elements, 8))
    place = EncodedPage.of(SHAPE.keys.shape, SHAPE.keys.shape, SHAPE.page_elements)
    codes = torch.arange(SHAPE.page_elements) % 255
    cell[:, place.codes :] = torch.where(codes == 127, 255 - 127, codes).to(torch.uint8)
    cell[:, : place.codes].view(torch.float16).fill_(0.5)
    pages = make_cache(SHAPE.page_elements, 8, torch.float32)
    nothing, tables = torch.zeros(128, dtype=torch.int64), torch.zeros(1, 0)
    moves = Moves(torch.arange(128), torch.arange(128), nothing, tables, tables)
    cpu.align(pages.layers, parts, moves, [cell], Codec.FP8)
    found = pages.layers[0][0].unique()
    assert (len(found), float(found.max()), LARGEST[Codec.FP8]) == (253, 224.0, 448.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tokens_are_read_alike_by_what_waits_and_by_what_does_not(device: str) -> None:
    shape = shape_of("HND 2x80")
    pages = make_cache(shape.page_elements, 5, torch.float16).layers[0]
    slots = torch.tensor([70, 3, 0, 33, 34])
    read = reference_codecs.reader(torch.device(device))
    assert read is (page_tokens.read_tokens if device == "cpu" else page_tokens.pick_tokens)
    for strides in (shape.keys, shape.values):
        expected = strides.tokens(pages)[slots]
        assert torch.equal(read(pages, strides, slots), expected)
