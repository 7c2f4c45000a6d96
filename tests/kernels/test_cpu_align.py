# SPDX-License-Identifier: Apache-2.0
"""The C++ `align`, for every instruction set this machine has: the reference's bits."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import (
    BITS,
    CASES,
    DTYPES,
    assert_agrees,
    hnd,
    make_cache,
    make_loads,
    make_moves,
    make_region,
    nhd,
    pairs_of,
    parts_of,
    shape_of,
)
from tests.prefill.pages import BLOCK_SIZE, HEAD_SIZE, LAYOUTS
from vllm_segreuse.kernels import cpu, reference
from vllm_segreuse.kernels.pages import Moves, Part, Rotation

NUM_BLOCKS = 12
ROTATIONS = [
    Rotation(HEAD_SIZE, True),
    Rotation(HEAD_SIZE, False),
    Rotation(HEAD_SIZE // 2, True),
    Rotation(8, False, first=16),
    Rotation(8, True, first=24),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Piece(NamedTuple):
    """Tokens that follow each other at either end."""

    source: int
    target: int
    length: int
    distance: int


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Targets in order, with gaps; sources anywhere, so that the two may overlap."""
    made, target = [], draw(st.integers(0, 40))
    while len(made) < 6:
        length = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 64, 100]))
        if target + length > NUM_BLOCKS * BLOCK_SIZE:
            break
        source = draw(st.integers(0, NUM_BLOCKS * BLOCK_SIZE - length))
        distance = draw(
            st.sampled_from([0, 1, -1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100_000])
        )
        made.append(Piece(source, target, length, distance))
        target += length + draw(st.sampled_from([0, 0, 1, 50]))
    return made


def moves_of(made: list[Piece], rotation: Rotation | None, overlapping: bool) -> Moves:
    def slots(which: int) -> torch.Tensor:
        return torch.cat([torch.arange(p[which], p[which] + p.length) for p in made])

    distances = torch.cat([torch.full((p.length,), p.distance) for p in made])
    distinct, angles = torch.unique(distances, return_inverse=True)
    pairs = rotation.dim // 2 if rotation else 0
    turns = distinct[:, None].double() * torch.logspace(0, -4, pairs, dtype=torch.float64)
    return Moves(slots(0), slots(1), angles, turns.cos().float(), turns.sin().float(), overlapping)


def pages_of(dtype: torch.dtype, layers: int = 1) -> list[torch.Tensor]:
    pages = torch.randn(layers, NUM_BLOCKS, shape_of("HND").page_elements)
    return list((3 * pages).to(dtype))


def raw(pages: torch.Tensor) -> torch.Tensor:
    """The bits, so that NaN equals itself and 0 differs from -0."""
    return pages.view(BITS[pages.element_size()])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case.values, DTYPES[number % len(DTYPES)]) for number, case in enumerate(CASES)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_every_layout_and_rotation(built: str, case: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Single tokens, pages of 8 and 16 tokens, and nothing beside the pages is written."""
    name, rotation = case
    shape = shape_of(name)
    parts = parts_of(shape, rotation)
    pages = make_cache(shape.page_elements, 4, dtype, num_layers=2)
    for overlapping in (True, False):
        moves = make_moves(4, shape.keys.shape[1], 13, pairs_of(parts), overlapping)
        assert_agrees(cpu.align, pages, parts, moves, "cpu")


@pytest.mark.parametrize("start", [16, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case.values, DTYPES[number % len(DTYPES)]) for number, case in enumerate(CASES)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_tokens_are_read_elsewhere(
    built: str, case: tuple[Any, ...], dtype: torch.dtype, start: int
) -> None:
    """From more rows than there are blocks, whose layers lie side by side."""
    name, rotation = case
    shape = shape_of(name)
    parts = parts_of(shape, rotation)
    pages = make_cache(shape.page_elements, 3, dtype, num_layers=2)
    region = make_region(shape.page_elements, 7, dtype, 2, start)
    moves = make_loads(7, 3, shape.keys.shape[1], 13, pairs_of(parts))
    assert_agrees(cpu.align, pages, parts, moves, "cpu", region)


@pytest.mark.parametrize("overlapping", [False, True], ids=["apart", "overlapping"])
@pytest.mark.parametrize("layout", ["tiled by 32", "tiled by 16", "pairs", "NHD"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_turns_as_in_the_reference(
    built: str, dtype: torch.dtype, layout: str, overlapping: bool
) -> None:
    """Infinities, NaN, subnormals and numbers halfway between two, in whole tiles of 32 tokens."""
    shape = shape_of(layout)
    pages = make_cache(shape.page_elements, 8, dtype)
    size = dtype.itemsize
    codes = torch.randint(-(1 << 31), 1 << 31, pages.memory.shape).to(BITS[size])
    raw(pages.memory).copy_(codes)
    moves = moves_of([Piece(3, 4 * BLOCK_SIZE + 9, 200, 5000)], ROTATIONS[0], overlapping)
    moves.cos[:, :4], moves.sin[:, :4] = torch.randint(-16, 17, (2, 1, 4)) / 16
    assert_agrees(cpu.align, pages, parts_of(shape, ROTATIONS[0]), moves, "cpu")


@pytest.mark.parametrize(
    ("layout", "by"), [("tiled by 32", -33), ("tiled by 32", 1), ("HND", -1), ("HND", 17)]
)
def test_a_shift_over_itself_reads_before_it_writes(
    built: str, threads: int, layout: str, by: int
) -> None:
    """Each token with an angle of its own: as many pieces of work as tokens."""
    shape = shape_of(layout)
    pages = make_cache(shape.page_elements, 8, torch.bfloat16, num_layers=3)
    sources = torch.arange(40, 340)
    moves = make_moves(8, BLOCK_SIZE, 300, HEAD_SIZE // 2, overlapping=True)
    moves = dataclasses.replace(moves, sources=sources, targets=sources + by)
    assert_agrees(cpu.align, pages, parts_of(shape, ROTATIONS[0]), moves, "cpu")


@pytest.mark.parametrize("layout", ["tiled by 32", "HND"])
def test_layers_and_tokens_are_shared_out_among_threads(
    built: str, threads: int, layout: str
) -> None:
    shape = shape_of(layout)
    pages = make_cache(shape.page_elements, 12, torch.bfloat16, num_layers=5)
    moves = make_moves(12, BLOCK_SIZE, 384, HEAD_SIZE // 2, overlapping=False)
    assert_agrees(cpu.align, pages, parts_of(shape, ROTATIONS[1]), moves, "cpu")


@pytest.mark.parametrize("overlapping", [False, True], ids=["apart", "overlapping"])
@pytest.mark.parametrize("block_size", [8, 16, 24, 48])
def test_runs_end_where_a_page_does(built: str, block_size: int, overlapping: bool) -> None:
    """Also in pages that are no multiple of a vector of tokens, and from odd offsets."""
    shape = hnd(2, block_size, 32)
    pages = make_cache(shape.page_elements, 16, torch.bfloat16, num_layers=2)
    made = [
        Piece(0, 8 * block_size, 3 * block_size, 7),
        Piece(3 * block_size + 5, 12 * block_size + 3, 2 * block_size, 40),
    ]
    moves = moves_of(made, ROTATIONS[0], overlapping)
    assert_agrees(cpu.align, pages, parts_of(shape, ROTATIONS[0]), moves, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_that_stays_keeps_its_values(built: str, dtype: torch.dtype) -> None:
    shape = shape_of("tiled by 32")
    parts, pages = parts_of(shape, ROTATIONS[0]), pages_of(dtype)
    before = pages[0].clone()
    cpu.align(pages, parts, moves_of([Piece(5, 300, 77, 0)], ROTATIONS[0], True))
    for part in parts:
        old, new = (part.strides.tokens(raw(p)).view(dtype).float() for p in (before, pages[0]))
        assert torch.equal(new[300:377], old[5:82])


def test_nothing_to_move_changes_nothing() -> None:
    shape = nhd(2, 16, 32)
    pages = make_cache(shape.page_elements, 4, torch.float16)
    before = pages.memory.clone()
    cpu.align(pages.layers, [Part(shape.keys, ROTATIONS[0])], make_moves(4, 16, 0, 16, True))
    cpu.align([], [Part(shape.keys, ROTATIONS[0])], make_moves(4, 16, 3, 16, True))
    assert torch.equal(pages.memory, before)


def test_pages_on_another_device_are_refused() -> None:
    shape = nhd(2, 16, 32)
    pages = [torch.empty(4, shape.page_elements, dtype=torch.float16, device="meta")]
    with pytest.raises(ValueError, match=r"pages are on meta; the C\+\+ kernels need them on"):
        cpu.align(pages, [Part(shape.keys, ROTATIONS[0])], make_moves(4, 16, 3, 16, True))


@settings(max_examples=3)
@given(made=pieces(), rotation=st.sampled_from([*ROTATIONS, None]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_tokens_are_read_elsewhere(
    built: str, layout: str, dtype: torch.dtype, made: list[Piece], rotation: Rotation | None
) -> None:
    """Of a CPU's region, whose rows are not aligned to lines of its caches."""
    shape = shape_of(layout)
    region = make_region(shape.page_elements, NUM_BLOCKS, dtype, num_layers=2)
    pages = make_cache(shape.page_elements, NUM_BLOCKS, dtype, num_layers=2)
    moves = moves_of(made, rotation, overlapping=False)
    assert_agrees(cpu.align, pages, parts_of(shape, rotation), moves, "cpu", region)


@settings(max_examples=6)
@given(made=pieces(), rotation=st.sampled_from([*ROTATIONS, None]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_tokens_are_moved_as_the_reference_does(
    built: str, layout: str, dtype: torch.dtype, made: list[Piece], rotation: Rotation | None
) -> None:
    parts = parts_of(shape_of(layout), rotation)
    read = {s // BLOCK_SIZE for p in made for s in range(p.source, p.source + p.length)}
    written = {s // BLOCK_SIZE for p in made for s in range(p.target, p.target + p.length)}
    moves = moves_of(made, rotation, overlapping=bool(read & written))
    expected = pages_of(dtype, layers=2)
    pages = [page.clone() for page in expected]
    reference.align(expected, parts, moves)
    cpu.align(pages, parts, moves)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(pages, expected, strict=True))
