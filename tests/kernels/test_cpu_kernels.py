# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels, for every instruction set this machine has, against plain torch and float64."""

import itertools
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prefill.pages import BLOCK_SIZE, HEAD_SIZE, HEADS, LAYOUTS, make_layer
from vllm_segreuse.kernels import cpu, reference
from vllm_segreuse.kernels.pages import Moves, PageLayout, Part, Rotation, TiledStrides
from vllm_segreuse.prefill.kv_layout import discover_layout

NUM_BLOCKS = 12
SETS = {"amx": "AMX", "avx512": "AVX512", "avx2": "AVX2", "baseline": "DEFAULT"}
ORDER = list(SETS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
ROTATIONS = [
    Rotation(HEAD_SIZE, True),
    Rotation(HEAD_SIZE, False),
    Rotation(HEAD_SIZE // 2, True),
    Rotation(8, False, first=16),
    Rotation(8, True, first=24),
]


@pytest.fixture(scope="module", params=ORDER)
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each library in turn; the machine's own capability decides which may run."""
    best = next((name for name, known in SETS.items() if known == cpu.capability()), "baseline")
    if ORDER.index(request.param) < ORDER.index(best):
        pytest.skip(f"this machine has no {request.param}")
    if cpu.unavailable():
        pytest.skip(str(cpu.unavailable()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "capability", lambda: SETS[request.param])
        cpu._library.cache_clear()
        assert cpu.instruction_set() == request.param
        yield request.param
    cpu._library.cache_clear()


def found_layout(name: str) -> PageLayout:
    return discover_layout(make_layer(name), BLOCK_SIZE)


LAYOUT = {name: found_layout(name) for name in LAYOUTS}


def pages_of(dtype: torch.dtype, layers: int = 1) -> list[torch.Tensor]:
    pages = torch.randn(layers, NUM_BLOCKS, 2 * HEADS * BLOCK_SIZE * HEAD_SIZE)
    return list((3 * pages).to(dtype))


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


def raw(pages: torch.Tensor) -> torch.Tensor:
    """The bits, so that NaN equals itself and 0 differs from -0."""
    return pages.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pages.element_size()])


@settings(max_examples=15)
@given(made=pieces(), rotation=st.sampled_from([*ROTATIONS, None]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_alignment_is_the_references_bit_for_bit(
    built: str, layout: str, dtype: torch.dtype, made: list[Piece], rotation: Rotation | None
) -> None:
    parts = [Part(LAYOUT[layout].keys, rotation), Part(LAYOUT[layout].values, None)]
    read = {s // BLOCK_SIZE for p in made for s in range(p.source, p.source + p.length)}
    written = {s // BLOCK_SIZE for p in made for s in range(p.target, p.target + p.length)}
    moves = moves_of(made, rotation, overlapping=bool(read & written))
    expected = pages_of(dtype, layers=2)
    pages = [page.clone() for page in expected]
    reference.align(expected, parts, moves)
    cpu.align(pages, parts, moves)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(pages, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_without_overlap_needs_no_scratch(built: str, dtype: torch.dtype) -> None:
    """The same copies on either path."""
    parts = [Part(LAYOUT["tiled by 32"].keys, ROTATIONS[0]), Part(LAYOUT["HND"].values, None)]
    made = [Piece(3, 6 * BLOCK_SIZE + 9, 200, 5000)]
    direct, staged = pages_of(dtype), None
    staged = [page.clone() for page in direct]
    cpu.align(direct, parts, moves_of(made, ROTATIONS[0], overlapping=False))
    cpu.align(staged, parts, moves_of(made, ROTATIONS[0], overlapping=True))
    assert torch.equal(raw(direct[0]), raw(staged[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_that_stays_keeps_its_values(built: str, dtype: torch.dtype) -> None:
    layout = LAYOUT["tiled by 32"]
    parts = [Part(layout.keys, ROTATIONS[0]), Part(layout.values, None)]
    pages = pages_of(dtype)
    before = pages[0].clone()
    cpu.align(pages, parts, moves_of([Piece(5, 300, 77, 0)], ROTATIONS[0], True))
    for part in (layout.keys, layout.values):
        old, new = (part.tokens(raw(p)).view(dtype).float() for p in (before, pages[0]))
        assert torch.equal(new[300:377], old[5:82])


def attention_in_float64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`[queries, heads, size]`, query by query and head by head."""
    group = query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i, position in enumerate(positions.tolist()):
        for head in range(query.shape[1]):
            seen = slice(0, position + 1)
            logits = key[seen, head // group].double() @ query[i, head].double() * scale
            out[i, head] = logits.softmax(0) @ value[seen, head // group].double()
    return out


CASES = {
    "one at the start": [[0]],
    "one far out": [[700]],
    "two requests": [[0, 5, 63, 64, 65], [1, 127, 128, 300, 767]],
    "more than a tile": [list(range(3, 763, 4))],
    "neighbours": [list(range(100)), list(range(40, 170))],
}


@pytest.mark.parametrize(
    ("layout", "group", "case"),
    [
        *itertools.product(["HND", "tiled by 32", "pairs", "NHD"], [1, 2], CASES),
        ("tiled by 32", 5, "two requests"),
        ("tiled by 32", 80, "two requests"),  # more heads than a tile has rows
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scattered_queries_attend_to_their_past(
    built: str, layout: str, dtype: torch.dtype, group: int, case: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2 * NUM_BLOCKS, 2 * HEADS * BLOCK_SIZE * HEAD_SIZE, generator=generator)
    pages = pages.to(dtype)
    tables = torch.randperm(2 * NUM_BLOCKS, generator=generator).int().view(2, NUM_BLOCKS)
    where = CASES[case]
    positions = torch.tensor([p for request in where for p in request])
    request = torch.tensor([i for i, request in enumerate(where) for _ in request])
    query = torch.randn(len(positions), HEADS * group, HEAD_SIZE, generator=generator).to(dtype)
    found = LAYOUT[layout]
    out = torch.full_like(query, float("nan"))
    scale = 2 / math.sqrt(HEAD_SIZE)
    cpu.sparse_attention(
        out, query, pages, found.keys, found.values, tables, request, positions, scale
    )
    for i in range(len(where)):
        mine = request == i
        key, value = (p.tokens(pages[tables[i].long()]) for p in (found.keys, found.values))
        expected = attention_in_float64(query[mine], key, value, positions[mine], scale)
        error = (out[mine].double() - expected).abs().max()
        # float32 inside, one rounding at the end.
        assert error <= 1e-5 + torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
def test_head_sizes(built: str, size: int) -> None:
    keys = TiledStrides((1, 32, size), 0, 0, 32, 0, 1, size, 0, 32)
    values = TiledStrides((1, 32, size), 32 * size, 0, 32, 0, size, size, 0, 1)
    pages = torch.randn(4, 2 * 32 * size)
    query, positions = torch.randn(3, 2, size), torch.tensor([0, 50, 127])
    tables = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    out, expected = torch.empty_like(query), torch.empty_like(query)
    args = (pages, keys, values, tables, torch.zeros(3, dtype=torch.int64), positions, 0.3)
    cpu.sparse_attention(out, query, *args)
    reference.sparse_attention(expected, query, *args)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_large_logits_do_not_overflow(built: str) -> None:
    layout = LAYOUT["tiled by 32"]
    pages = pages_of(torch.float32)[0]
    query, positions = 100 * torch.randn(5, HEADS, HEAD_SIZE), torch.arange(300, 305)
    tables = torch.arange(NUM_BLOCKS, dtype=torch.int32)[None]
    out, expected = torch.empty_like(query), torch.empty_like(query)
    args = (pages, layout.keys, layout.values, tables, torch.zeros(5, dtype=torch.int64))
    cpu.sparse_attention(out, query, *args, positions, 1.0)
    reference.sparse_attention(expected, query, *args, positions, 1.0)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["HND", "tiled by 32", "pairs"])
@pytest.mark.parametrize("count", [1, 9, 200])
@pytest.mark.parametrize("highest", [False, True], ids=["sum", "peak"])
def test_scores_are_the_references(
    built: str, layout: str, dtype: torch.dtype, count: int, highest: bool
) -> None:
    found, num_tokens = LAYOUT[layout], NUM_BLOCKS * BLOCK_SIZE - 5
    pages = pages_of(dtype)[0]
    blocks = torch.randperm(NUM_BLOCKS)
    positions = torch.randperm(num_tokens)[:count].sort().values
    query = torch.randn(count, 3 * HEADS, HEAD_SIZE).to(dtype)
    args = (query, positions, pages, found.keys, blocks, num_tokens, 0.2, highest)
    scores = cpu.token_scores(*args)
    torch.testing.assert_close(scores, reference.token_scores(*args), atol=2e-5, rtol=2e-5)
    assert (scores[int(positions[-1]) + 1 :] == 0).all()
    if not highest:
        assert float(scores.sum()) == pytest.approx(count * 3 * HEADS, rel=1e-4)


def test_scores_are_the_same_in_every_run(built: str) -> None:
    found = LAYOUT["tiled by 32"]
    pages, positions = pages_of(torch.bfloat16)[0], torch.arange(600, 740)
    query = torch.randn(140, 4, HEAD_SIZE).bfloat16()
    args = (query, positions, pages, found.keys, torch.arange(NUM_BLOCKS), 740, 0.2)
    first = cpu.token_scores(*args)
    assert all(torch.equal(cpu.token_scores(*args), first) for _ in range(5))


def test_what_the_kernel_cannot_do_is_refused() -> None:
    odd = TiledStrides((1, 32, 24), 0, 0, 32, 0, 1, 24, 0, 32)
    assert not cpu.supports_attention(odd, torch.float32)
    assert not cpu.supports_attention(LAYOUT["HND"].keys, torch.float8_e4m3fn)
    query, positions = torch.randn(1, 1, 24), torch.tensor([0])
    with pytest.raises(ValueError, match=r"head size of 24; the .* multiples of 16"):
        cpu.token_scores(query, positions, torch.randn(1, 768), odd, torch.zeros(1).int(), 1, 1.0)


def test_without_a_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "__file__", "/nowhere/cpu.py")
    cpu._library.cache_clear()
    try:
        assert "no compiler at installation" in str(cpu.unavailable())
    finally:
        cpu._library.cache_clear()


def test_a_library_of_another_version_is_not_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" void segreuse_sizes(long* sizes) { sizes[0] = 8; }')
    library = tmp_path / "_cpu_baseline.so"
    done = subprocess.run(["c++", "-shared", "-fPIC", source, "-o", library], check=False)
    if done.returncode:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    cpu._library.cache_clear()
    try:
        assert "install the package again" in str(cpu.unavailable())
    finally:
        cpu._library.cache_clear()
