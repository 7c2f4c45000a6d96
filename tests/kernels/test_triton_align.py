# SPDX-License-Identifier: Apache-2.0
"""The Triton `align` agrees with the reference to the last bit."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import (
    CASES,
    DTYPES,
    assert_agrees,
    assert_same,
    channel_tiles,
    copy_of,
    hnd,
    make_cache,
    make_loads,
    make_moves,
    make_region,
    mla,
    nhd,
    pairs_of,
    parts_of,
    shape_of,
    to_device,
)
from tests.kernels.triton_running import DEVICE, require_triton
from vllm_segreuse.kernels.pages import Moves, Part, Rotation

require_triton()

from vllm_segreuse.kernels import scratch, triton_align  # noqa: E402
from vllm_segreuse.kernels.triton_align import align  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("number", range(len(DTYPES)), ids=lambda number: str(DTYPES[number]))
def test_the_smallest(number: int, neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of two heads, more tokens than a program moves, a scratch for one layer only; also
    where turned numbers are beyond the largest, and halfway between two."""
    monkeypatch.setattr(triton_align, "_TILE_ELEMENTS", 16 * 32)
    monkeypatch.setattr(scratch, "SCRATCH_BYTES", 1)
    shape = channel_tiles(2, 8, 24, 8)
    pages = make_cache(shape.page_elements, 6, DTYPES[number], num_layers=2)
    moves = make_moves(6, 8, 21, 6, overlapping=number % 2 == neox)
    moves.cos[3], moves.sin[3] = 64 * moves.cos[3], 64 * moves.sin[3]
    moves.cos[4], moves.sin[4] = (torch.randint(-16, 17, (6,)) / 16 for _ in range(2))
    assert_agrees(align, pages, parts_of(shape, Rotation(12, neox, 4)), moves, DEVICE)


def test_the_smallest_of_latents() -> None:
    """Of MLA, whose keys are narrower than its values."""
    shape = mla(20, 12)
    pages = make_cache(shape.page_elements, 4, torch.bfloat16)
    moves = make_moves(4, 16, 9, 6, True)
    assert_agrees(align, pages, parts_of(shape, Rotation(12, False)), moves, DEVICE)


def test_the_smallest_of_keys_alone() -> None:
    """Of several heads, with and without a scratch; values stay where they are."""
    shape = hnd(3, 8, 20)
    pages = make_cache(shape.page_elements, 4, torch.float16, num_layers=2)
    for overlapping in (False, True):
        moves = make_moves(4, 8, 9, 6, overlapping)
        assert_agrees(align, pages, [Part(shape.keys, Rotation(12, True, 4))], moves, DEVICE)


# Each layout and rotation with one dtype, by turns. Many heads say no more, and take long here.
CHOSEN = [case.values for case in CASES if "40x" not in str(case.id)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, DTYPES[number % len(DTYPES)]) for number, case in enumerate(CHOSEN)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_every_layout_and_rotation(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    name, rotation = case
    shape = shape_of(name)
    parts = parts_of(shape, rotation)
    pages = make_cache(shape.page_elements, 4, dtype)
    overlapping = make_moves(4, shape.keys.shape[1], 13, pairs_of(parts), True)
    assert_agrees(align, pages, parts, overlapping, DEVICE)
    apart = make_moves(4, shape.keys.shape[1], 7, pairs_of(parts), False)
    assert_agrees(align, pages, parts, apart, DEVICE)


@pytest.mark.parametrize("start", [16, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("number", range(len(DTYPES)), ids=lambda number: str(DTYPES[number]))
def test_the_smallest_that_is_read_elsewhere(number: int, start: int) -> None:
    """From more rows than there are blocks, whose layers lie side by side."""
    shape = [nhd(2, 16, 32), hnd(3, 8, 20), channel_tiles(2, 8, 24, 8)][number % 3]
    parts = parts_of(shape, Rotation(12, number % 2 == 0, 4))
    pages = make_cache(shape.page_elements, 3, DTYPES[number], num_layers=2)
    region = make_region(shape.page_elements, 7, DTYPES[number], 2, start)
    moves = make_loads(7, 3, shape.keys.shape[1], 13, pairs_of(parts))
    assert_agrees(align, pages, parts, moves, DEVICE, region)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_every_dtype(dtype: torch.dtype, neox: bool, scale: float) -> None:
    """Also where turned numbers are beyond the largest: all codes of fp8 are in such a cache."""
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(24, neox, 4))
    pages = make_cache(shape.page_elements, 8, dtype)
    moves = make_moves(8, 16, 60, 12, overlapping=False)
    moves = dataclasses.replace(moves, cos=scale * moves.cos, sin=scale * moves.sin)
    assert_agrees(align, pages, parts, moves, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_ties_are_rounded_to_even(dtype: torch.dtype) -> None:
    """Sixteenths of short numbers often lie halfway between two of them."""
    shape = nhd(2, 16, 32)
    pages = make_cache(shape.page_elements, 8, dtype)
    if dtype.itemsize > 1:
        pages.memory.copy_(torch.randint(-(1 << 12), 1 << 12, pages.memory.shape))
    moves = make_moves(8, 16, 64, 16, overlapping=False)
    cos, sin = (torch.randint(-16, 17, (7, 16)) / 16 for _ in range(2))
    moves = dataclasses.replace(moves, cos=cos, sin=sin)
    assert_agrees(align, pages, parts_of(shape, Rotation(32, True)), moves, DEVICE)


@pytest.mark.parametrize("shift", [0, 1, -1, 15, 17, 100_003])
@pytest.mark.parametrize("rotation", [Rotation(32, True), Rotation(32, False)], ids=str)
def test_turns_by_the_distance(shift: int, rotation: Rotation) -> None:
    frequencies = torch.logspace(0, -4, 16, dtype=torch.float64)
    angle = (shift * frequencies)[None]
    shape = hnd(2, 16, 32)
    pages = make_cache(shape.page_elements, 6, torch.bfloat16)
    moves = make_moves(6, 16, 40, 16, overlapping=True)
    moves = dataclasses.replace(
        moves,
        angles=torch.zeros(40, dtype=torch.int64),
        cos=angle.cos().float(),
        sin=angle.sin().float(),
    )
    parts = parts_of(shape, rotation)
    assert_agrees(align, pages, parts, moves, DEVICE)
    if shift == 0:
        mine = copy_of(pages, DEVICE)
        align(mine.layers, parts, to_device(moves, DEVICE))
        for part in parts:
            old, new = (part.strides.tokens(cache.layers[0].cpu()) for cache in (pages, mine))
            assert torch.equal(new[moves.targets], old[moves.sources])


@pytest.mark.parametrize("tokens", [1, 32, 33, 65])
@pytest.mark.parametrize("scratch_bytes", [1, 3 * 33 * 256])
def test_any_number_of_tokens_and_layers_at_a_time(
    tokens: int, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SCRATCH_BYTES", scratch_bytes)
    shape = nhd(2, 8, 32)
    parts = parts_of(shape, Rotation(32, True))
    pages = make_cache(shape.page_elements, 12, torch.float16, num_layers=4)
    moves = make_moves(12, 8, tokens, 16, overlapping=True)
    assert_agrees(align, pages, parts, moves, DEVICE)


@pytest.mark.parametrize("by", [-17, -1, 1, 16])
def test_a_shift_over_itself_reads_before_it_writes(by: int) -> None:
    shape = hnd(2, 16, 64)
    pages = make_cache(shape.page_elements, 8, torch.float16, num_layers=2)
    sources = torch.arange(20, 100)
    moves = make_moves(8, 16, 80, 32, overlapping=True)
    moves = dataclasses.replace(moves, sources=sources, targets=sources + by)
    assert_agrees(align, pages, parts_of(shape, Rotation(64, True)), moves, DEVICE)


@pytest.mark.parametrize(("start", "gap"), [(12, 16), (16, 4), (3, 5)])
def test_pages_need_not_be_aligned(start: int, gap: int) -> None:
    shape = nhd(3, 16, 32)
    pages = make_cache(shape.page_elements, 6, torch.bfloat16, 2, gap, start)
    moves = make_moves(6, 16, 40, 16, overlapping=False)
    assert_agrees(align, pages, parts_of(shape, Rotation(32, True)), moves, DEVICE)


def test_the_smallest_whose_offsets_need_more_than_32_bits() -> None:
    """Two pages, more than 2**32 elements apart; what is between them is never touched."""
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    moves = to_device(make_moves(2, 16, 16, 16, overlapping=False), DEVICE)
    near = make_cache(shape.page_elements, 2, torch.float8_e4m3fn).layers[0].to(DEVICE)
    stride = (1 << 32) + 16
    memory = torch.empty(stride + shape.page_elements, dtype=torch.uint8, device=DEVICE)
    far = memory.view(near.dtype).as_strided(near.shape, (stride, 1))
    far[0].copy_(near[0])
    align([far], parts, moves)
    align([near], parts, moves)
    found, expected = (
        parts[0].strides.tokens(layer[1:].cpu())[moves.targets.cpu() % 16] for layer in (far, near)
    )
    assert_same(found, expected)


@settings(max_examples=10)
@given(st.data())
def test_random_plans(data: st.DataObject) -> None:
    heads, block_size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([8, 16, 24]))
    pairs = data.draw(st.integers(1, 12))
    first, behind = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    rotation = Rotation(2 * pairs, data.draw(st.booleans()), first)
    make = data.draw(st.sampled_from([nhd, hnd]))
    shape = make(heads, block_size, first + 2 * pairs + behind)
    overlapping = data.draw(st.booleans())
    moves = make_moves(6, block_size, data.draw(st.integers(1, 24)), pairs, overlapping)
    pages = make_cache(shape.page_elements, 6, data.draw(st.sampled_from(DTYPES)), 2)
    assert_agrees(align, pages, parts_of(shape, rotation), moves, DEVICE)


@pytest.mark.parametrize("overlapping", [False, True])
def test_latents(overlapping: bool) -> None:
    shape = mla(100, 28)
    pages = make_cache(shape.page_elements, 4, torch.bfloat16, num_layers=3)
    moves = make_moves(4, 16, 20, 14, overlapping)
    assert_agrees(align, pages, parts_of(shape, Rotation(28, False)), moves, DEVICE)


def test_nothing_to_move_changes_nothing() -> None:
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    pages = copy_of(make_cache(shape.page_elements, 4, torch.float16), DEVICE)
    before = pages.memory.clone()
    align(pages.layers, parts, to_device(make_moves(4, 16, 0, 16, True), DEVICE))
    align([], parts, to_device(make_moves(4, 16, 3, 16, True), DEVICE))
    assert torch.equal(pages.memory, before)


def changed(**changes: Any) -> Any:
    return lambda pages, parts, moves: (pages, parts, dataclasses.replace(moves, **changes))


REFUSED: dict[str, tuple[Any, str]] = {
    "dtype": (lambda pages, *rest: ([x.int() for x in pages], *rest), "pages are torch.int32"),
    "dtypes": (lambda pages, *rest: ([*pages, pages[0].half()], *rest), "number 2 has"),
    "strides": (lambda pages, *rest: ([*pages, pages[0].clone()], *rest), "number 2 has"),
    "pages": (lambda pages, *rest: ([x[:, ::2] for x in pages], *rest), "with unit stride"),
    "table": (changed(cos=torch.zeros(7, 4, device=DEVICE)), "alike, not empty: sin"),
    "slots": (changed(sources=torch.arange(18, device=DEVICE)[::2]), "sources must be contiguous"),
    "types": (changed(angles=torch.zeros(9, device=DEVICE).int()), "not torch.int32"),
    "count": (changed(targets=torch.arange(8, device=DEVICE)), r"targets is \(8,\)"),
}


def test_sources_of_other_layers_are_refused() -> None:
    shape = nhd(2, 16, 32)
    pages = copy_of(make_cache(shape.page_elements, 4, torch.bfloat16, 2), DEVICE).layers
    moves = to_device(make_moves(4, 16, 9, 16, False), DEVICE)
    with pytest.raises(ValueError, match="sources are of 1 layers, pages of 2"):
        align(pages, parts_of(shape, Rotation(32, True)), moves, pages[:1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    spoil, message = REFUSED[name]
    shape = nhd(2, 16, 32)
    pages = copy_of(make_cache(shape.page_elements, 4, torch.bfloat16, 2), DEVICE).layers
    moves = to_device(make_moves(4, 16, 9, 16, False), DEVICE)
    parts = parts_of(shape, Rotation(32, True))
    with pytest.raises(ValueError, match=message):
        align(*spoil(pages, parts, moves))


def test_parts_of_other_heads_are_refused() -> None:
    one, other = nhd(2, 16, 32), nhd(4, 16, 16)
    pages = copy_of(make_cache(one.page_elements, 4, torch.bfloat16), DEVICE).layers
    moves: Moves = to_device(make_moves(4, 16, 9, 16, False), DEVICE)
    assert other.values is not None
    with pytest.raises(ValueError, match="4 and 2 heads"):
        align(pages, [Part(one.keys, None), Part(other.values, None)], moves)
