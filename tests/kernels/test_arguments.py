# SPDX-License-Identifier: Apache-2.0
"""What kernels are given is checked before an address is passed on; what is wrong is named.

Each case spoils one argument of a call that is good. The Triton kernels go through the same checks:
test_triton_align.py, test_triton_attention.py and test_triton_scores.py have some cases of each.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import NAMES, good_call, hnd, shape_of, to_device
from vllm_segreuse.kernels import arguments, cpu, cuda
from vllm_segreuse.kernels.pages import Moves, Part, Rotation, TiledStrides

needs_library = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))


def changed_moves(**changes: object) -> Callable[..., tuple]:
    return lambda pages, parts, moves: (pages, parts, dataclasses.replace(moves, **changes))


def changed_keys(**changes: object) -> Callable[..., tuple]:
    def change(pages: list[torch.Tensor], parts: list[Part], moves: Moves) -> tuple:
        strides = dataclasses.replace(parts[0].strides, **changes)
        return pages, [Part(strides, parts[0].rotation), parts[1]], moves

    return change


def changed_rotation(*rotation: int) -> Callable[..., tuple]:
    return lambda pages, parts, moves: (
        pages,
        [Part(parts[0].strides, Rotation(*rotation)), parts[1]],
        moves,
    )


REFUSED: dict[str, tuple[Callable[..., tuple], str]] = {
    "dtype": (lambda p, *r: ([x.double() for x in p], *r), "pages are torch.float64"),
    "mixed dtypes": (lambda p, *r: ([*p[:2], p[2].bfloat16()], *r), "number 2 has"),
    "mixed strides": (lambda p, *r: ([p[0], p[1].contiguous(), p[2]], *r), "number 1 has"),
    "mixed devices": (lambda p, *r: ([p[0], p[1].to("meta")], *r), "number 1 has"),
    "shape": (lambda p, *r: ([x[None] for x in p], *r), "must be .num_blocks, page_elements"),
    "strided pages": (lambda p, *r: ([x[:, ::2] for x in p], *r), "with unit stride"),
    "no parts": (lambda p, _, m: (p, [], m), "0 parts given"),
    "block sizes": (changed_keys(shape=(2, 8, 32), token_tile=8), "differ in tokens per page"),
    "tile": (changed_keys(channel_tile=12), "tiles do not fit"),
    "no tile": (changed_keys(token_tile=0), "tiles do not fit"),
    "beyond the page": (changed_keys(offset=1025), "elements 1025 to 2048 of a page of 2048"),
    "before the page": (changed_keys(token_lo=-64), "elements -960 to 63"),
    "one before the page": (changed_keys(offset=959, token_lo=-64), "elements -1 to 1022 of a"),
    "overlapping pages": (
        lambda p, *r: ([x.as_strided(x.shape, (2047, 1)) for x in p], *r),
        r"not \(4, 2048\) with strides \(2047, 1\); see `flat_pages`",
    ),
    "odd rotation": (changed_rotation(31, 1), "cannot turn by Rotation.dim=31"),
    "rotation of nothing": (changed_rotation(0, 1), "32 channels cannot turn by Rotation.dim=0"),
    "rotation before the head": (changed_rotation(30, 1, -1), "cannot turn by .* first=-1"),
    "rotation beyond the head": (changed_rotation(32, 1, 1), "32 channels cannot turn"),
    "other rotation": (changed_rotation(16, 1), "16. channels turn, but cos and sin have .* 32"),
    "int32 slots": (changed_moves(sources=torch.zeros(9, dtype=torch.int32)), "sources must be"),
    "strided slots": (changed_moves(targets=torch.arange(18)[::2]), "targets must be contiguous"),
    "fewer slots": (changed_moves(targets=torch.arange(8)), "targets is .8,., of 9 tokens"),
    "more angles": (changed_moves(angles=torch.arange(10)), "angles is .10,., of 9 tokens"),
    "angles elsewhere": (changed_moves(angles=torch.zeros(9, device="meta").long()), "on meta"),
    "double tables": (changed_moves(cos=torch.zeros(7, 16).double()), "cos must be contiguous"),
    "transposed tables": (changed_moves(sin=torch.zeros(16, 7).T), "sin must be contiguous"),
    "unequal tables": (changed_moves(sin=torch.zeros(6, 16)), "alike, not empty: sin is"),
    "slots behind the pages": (
        changed_moves(targets=torch.arange(56, 65)),
        "targets are from 56 to 64; expected 0 to 63",
    ),
    "slots before the pages": (changed_moves(sources=torch.arange(-1, 8)), "sources are from -1"),
    "angles behind the tables": (
        changed_moves(angles=torch.full((9,), 7)),
        "angles are from 7 to 7; expected 0 to 6",
    ),
    "flat tables": (
        changed_moves(cos=torch.zeros(112), sin=torch.zeros(112)),
        r"cos and sin must be .distinct, pairs. alike, not empty: cos is \(112,\)",
    ),
    "empty tables": (changed_moves(cos=torch.zeros(0, 16), sin=torch.zeros(0, 16)), "not empty"),
}


ALIGN = pytest.mark.parametrize(
    "align", [pytest.param(cpu.align, marks=needs_library), cuda.make_call], ids=["cpu", "cuda"]
)


@ALIGN
def test_the_alignment_that_is_spoiled_below_is_good(align: Callable[..., Any]) -> None:
    align(*good_call())


@ALIGN
@pytest.mark.parametrize("name", REFUSED)
def test_alignments_that_do_not_fit_are_refused(align: Callable[..., Any], name: str) -> None:
    """And nothing is written."""
    spoil, message = REFUSED[name]
    pages, parts, moves = good_call()
    before = [page.clone() for page in pages]
    with pytest.raises(ValueError, match=message):
        align(*spoil(pages, parts, moves))
    assert all(map(torch.equal, pages, before))


FITS: dict[str, Callable[..., tuple]] = {
    "the first element of a page": changed_keys(offset=960, token_lo=-64),
    "the last element of a page": changed_keys(offset=1024),
    "pages side by side": lambda p, *rest: ([x.contiguous() for x in p], *rest),
    "the first and the last slot": changed_moves(
        sources=torch.tensor([0, 63, 1, 2, 3, 4, 5, 6, 7]),
        targets=torch.tensor([63, 0, 9, 10, 11, 12, 13, 14, 15]),
    ),
    "the first and the last row of the tables": changed_moves(
        angles=torch.tensor([0, 6] + [3] * 7)
    ),
    "the last pair of a head": lambda pages, parts, moves: (
        pages,
        [Part(parts[0].strides, Rotation(2, True, 30)), parts[1]],
        dataclasses.replace(moves, cos=torch.ones(7, 1), sin=torch.zeros(7, 1)),
    ),
    "keys alone": lambda pages, parts, moves: (pages, parts[:1], moves),
    "one layer": lambda pages, parts, moves: (pages[:1], parts, moves),
    "one layer that is read elsewhere": lambda pages, parts, moves: (
        pages[:1],
        parts,
        moves,
        [pages[0].clone()],
    ),
}


@ALIGN
@pytest.mark.parametrize("name", FITS)
def test_what_just_fits_is_moved(align: Callable[..., Any], name: str) -> None:
    align(*FITS[name](*good_call()))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_holds_all_that_is_described_or_is_refused(name: str) -> None:
    shape = shape_of(name)
    for part in (shape.keys, shape.values):
        held = part.view(torch.arange(shape.page_elements)[None])
        first, last = int(held.min()), int(held.max())
        arguments.check_strides(part, torch.empty(1, last + 1))
        with pytest.raises(
            ValueError, match=f"elements {first} to {last} of a page of {last} are described by"
        ):
            arguments.check_strides(part, torch.empty(1, last))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (0, 16, 32)},
        {"shape": (2, 0, 32)},
        {"shape": (2, 16, 0)},
        {"token_tile": -16},
        {"token_tile": 5},
        {"channel_tile": 0},
        {"channel_tile": 64},
    ],
    ids=str,
)
def test_every_size_is_at_least_one_and_a_whole_number_of_tiles(change: dict[str, Any]) -> None:
    keys = dataclasses.replace(good_call()[1][0].strides, **change)
    with pytest.raises(ValueError, match=r"^sizes and tiles do not fit each other: TiledStrides"):
        arguments.check_strides(keys, torch.empty(1, 1 << 20))


def test_tiles_and_sizes_of_one_fit() -> None:
    one = TiledStrides((1, 1, 1), 0, 1, 1, 1, 1, 1, 1, 1)
    arguments.check_strides(one, torch.empty(1, 1))


def test_elements_of_a_page_are_counted_in_31_bits() -> None:
    most = (1 << 31) - 1
    arguments.check_pages([torch.empty(1, most, device="meta")], (torch.float32,))
    with pytest.raises(ValueError, match=r"page of 2147483648 elements is too large: below 2..31"):
        arguments.check_pages([torch.empty(1, most + 1, device="meta")], (torch.float32,))


OTHER_SOURCES: dict[str, tuple[Callable[..., list[torch.Tensor]], str]] = {
    "fewer layers": (lambda p: p[:2], "sources are of 2 layers, pages of 3"),
    "none": (lambda p: [], "sources are of 0 layers"),
    "dtype": (lambda p: [x.bfloat16() for x in p], "pages are torch.bfloat16; the kernel knows"),
    "mixed": (lambda p: [*p[:2], p[2].contiguous()], "number 2 has"),
    "device": (lambda p: [x.to("meta") for x in p], "must be those of pages: .* on meta|meta"),
    "page size": (lambda p: [x[:, :1024] for x in p], "must be those of pages: .*1024. instead"),
    "strided": (lambda p: [x.T for x in p], "with unit stride"),
    "fewer rows": (lambda p: [x[:1] for x in p], "sources are from .*; expected 0 to 15"),
}


@ALIGN
@pytest.mark.parametrize("name", OTHER_SOURCES)
def test_sources_that_do_not_fit_are_refused(align: Callable[..., Any], name: str) -> None:
    spoil, message = OTHER_SOURCES[name]
    pages, parts, moves = good_call()
    moves = dataclasses.replace(moves, sources=torch.arange(9, 18))
    align(pages, parts, moves, pages)
    with pytest.raises(ValueError, match=message):
        align(pages, parts, moves, spoil(pages))


@ALIGN
def test_rows_of_sources_are_counted_by_themselves(align: Callable[..., Any]) -> None:
    """Slots behind the pages that are written may be read elsewhere, and not the other way."""
    pages, parts, moves = good_call()
    more = [torch.cat([x, x]) for x in pages]
    far = torch.arange(100, 109)
    align(pages, parts, dataclasses.replace(moves, sources=far), more)
    with pytest.raises(ValueError, match="targets are from 100 to 108; expected 0 to 63"):
        align(pages, parts, dataclasses.replace(moves, targets=far), more)


def test_cuda_moves_keys_and_values_only() -> None:
    pages, parts, moves = good_call()
    with pytest.raises(ValueError, match="3 parts given; the CUDA kernels move 1 to 2"):
        cuda.make_call(pages, [*parts, parts[0]], moves)


def test_cuda_counts_slots_in_32_bits() -> None:
    _, parts, moves = good_call()
    moves = to_device(moves, "meta")
    for num_pages, fits in ((1 << 28, True), ((1 << 28) + 1, False)):
        pages = torch.empty(num_pages, 2048, dtype=torch.float16, device="meta")
        if fits:
            cuda.make_call([pages], parts, moves)
        else:
            with pytest.raises(ValueError, match="268435457 pages have more than the"):
                cuda.make_call([pages], parts, moves)


@needs_library
def test_tables_are_not_checked_where_nothing_turns() -> None:
    pages, parts, moves = good_call()
    still = [Part(part.strides, None) for part in parts]
    moves = dataclasses.replace(moves, angles=torch.full((9,), 1 << 40))
    cpu.align(pages, still, moves)


SHAPE = hnd(2, 16, 32)
NUM_PAGES = 6


def good_attention() -> dict[str, Any]:
    """Three queries of the first request, one of the second; two blocks each."""
    query = torch.randn(4, 4, 32)
    return {
        "out": torch.zeros_like(query),
        "query": query,
        "pages": torch.randn(NUM_PAGES, SHAPE.page_elements),
        "keys": SHAPE.keys,
        "values": SHAPE.values,
        "block_tables": torch.tensor([[5, 0, 99], [3, 1, -7]], dtype=torch.int32),
        "request": torch.tensor([0, 0, 0, 1]),
        "positions": torch.tensor([4, 20, 31, 31]),
        "scale": 0.2,
    }


def good_scores() -> dict[str, Any]:
    """Four queries over two blocks."""
    return {
        "query": torch.randn(4, 4, 32),
        "positions": torch.tensor([4, 20, 31, 31]),
        "pages": torch.randn(NUM_PAGES, SHAPE.page_elements),
        "keys": SHAPE.keys,
        "block_ids": torch.tensor([5, 0, 99], dtype=torch.int32),
        "num_tokens": 32,
        "scale": 0.2,
    }


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


ODD = dataclasses.replace(SHAPE.keys, shape=(2, 16, 24), channel_tile=24)
PAGES = torch.randn(NUM_PAGES, SHAPE.page_elements)

# argument, what it is replaced by, and what is said
BOTH: list[tuple[str, Any, str]] = [
    ("query", torch.randn(4, 4, 32).half(), "query is torch.float16 on cpu; pages are torch.float"),
    ("query", torch.randn(4, 4, 32, device="meta"), "query is torch.float32 on meta"),
    ("query", torch.randn(4, 128), r"query is \(4, 128\); expected \[queries, heads, 32\]"),
    ("query", torch.randn(4, 3, 32), r"\(4, 3, 32\); .* a multiple of 2 KV heads"),
    ("query", torch.randn(4, 0, 32), r"\(4, 0, 32\); .* a multiple of 2 KV heads"),
    ("query", torch.randn(4, 4, 64), r"query is \(4, 4, 64\)"),
    ("pages", PAGES.double(), "pages are torch.float64"),
    ("pages", PAGES.bfloat16(), "alike, unless these are fp8"),
    ("pages", PAGES.to(torch.uint8), "pages are torch.uint8"),
    ("pages", torch.cat([PAGES, PAGES], 1)[:, ::2], "unit stride in the page"),
    ("pages", PAGES[..., None], "must be .num_blocks, page_elements"),
    ("pages", PAGES[:, :1000].contiguous(), "elements 0 to 1023 of a page of 1000"),
    ("pages", PAGES.to("meta"), "pages are on meta; the C.. kernels need them on the CPU"),
    ("positions", slots(4, 20, 31, 31).int(), "positions must be contiguous torch.int64 on cpu"),
    ("positions", torch.arange(8)[::2], r"not torch.int64 on cpu with strides \(2,\)"),
    ("positions", slots(0, 0, 0, 0).to("meta"), "not torch.int64 on meta"),
    ("positions", slots(4, 20), r"positions is \(2,\); expected one number for each of 4"),
    ("positions", slots(4, 20, 31, 31)[None], r"positions is \(1, 4\)"),
    ("scale", 0.0, "scale is 0.0; expected more than 0"),
    ("scale", -0.2, "scale is -0.2; expected more than 0"),
    ("soft_cap", -1.0, "soft_cap -1.0; expected 0 or more"),
    ("soft_cap", float("nan"), "soft_cap nan; expected 0 or more"),
    ("sinks", torch.zeros(3), r"sinks are \(3,\) torch.float32 on cpu; expected 4 floating-point"),
    ("sinks", torch.zeros(4, 1), r"sinks are \(4, 1\)"),
    ("sinks", torch.zeros(4).int(), "sinks are .* torch.int32"),
    ("sinks", torch.zeros(4, device="meta"), "on meta; expected 4 floating-point numbers on cpu"),
]
ATTENTION: list[tuple[str, Any, str]] = [
    *BOTH,
    ("out", torch.zeros(4, 4, 32).half(), "out must be contiguous torch.float32"),
    ("out", torch.zeros(4, 32, 4).transpose(1, 2), "out must be contiguous"),
    ("out", torch.zeros(3, 4, 32), r"out is \(3, 4, 32\); expected \(4, 4, 32\)"),
    ("values", dataclasses.replace(SHAPE.keys, offset=1025), "elements 1025 to 2048"),
    ("values", hnd(1, 16, 32).values, r"values are \(1, 16, 32\) per page"),
    ("request", slots(0, 0, 0, 1).int(), "request must be contiguous torch.int64"),
    ("request", slots(0, 0, 0, 0, 0, 0, 1, 1)[::2], r"request must be .* strides \(2,\)"),
    ("request", slots(0, 0, 1), r"request is \(3,\); expected one number for each of 4"),
    ("request", slots(0, 0, 0, 2), "request are from 0 to 2; expected 0 to 1"),
    ("request", slots(-1, 0, 0, 1), "request are from -1 to 1"),
    ("request", slots(0, 1, 0, 1), "query 2 are before those of query 1; sort"),
    ("request", slots(1, 0, 1, 0), "query 1 are before those of query 0; sort"),
    ("positions", slots(4, 20, 31, 48), "positions are from 4 to 48; expected 0 to 47"),
    ("positions", slots(-1, 20, 31, 31), "positions are from -1"),
    ("positions", slots(4, 20, 19, 31), "query 2 are before those of query 1; sort"),
    ("positions", slots(4, 20, 32, 31), "block_tables are from 0 to 99; expected 0 to 5"),
    ("positions", slots(4, 20, 31, 32), "block_tables are from -7 to 3; expected 0 to 5"),
    ("block_tables", torch.zeros(2, 3, dtype=torch.int64), r"block_tables is torch.int64 \(2, 3"),
    ("block_tables", torch.zeros(3, dtype=torch.int32), r"int32 \(3,\) on cpu; expected"),
    ("block_tables", torch.zeros(2, 3, device="meta").int(), "on meta; expected torch.int32"),
    ("window", -1, "window is -1 and soft_cap 0.0; expected 0 or more"),
]
SCORES: list[tuple[str, Any, str]] = [
    *BOTH,
    ("keys", ODD, r"query is \(4, 4, 32\); expected \[queries, heads, 24\]"),
    ("positions", slots(-1, 20, 31, 31), "positions from -1 to 31 are not ascending"),
    ("positions", slots(4, 31, 20, 31), "positions from 4 to 31 are not ascending"),
    ("positions", slots(4, 20, 31, 32), "block_ids are from 0 to 99; expected 0 to 5"),
    ("positions", slots(4, 20, 31, 48), "block_ids has 3 entries; the tokens fill 4 pages"),
    ("block_ids", torch.tensor([0.0, 1.0]), r"block_ids is torch.float32 \(2,\)"),
    ("block_ids", torch.tensor([[0, 1]]), r"block_ids is torch.int64 \(1, 2\)"),
    ("block_ids", torch.zeros(2, device="meta").int(), "block_ids is on meta; expected cpu"),
    ("block_ids", torch.tensor([-1, 0]), "block_ids are from -1 to 0"),
    ("num_tokens", -1, "num_tokens is -1; expected 0 or more"),
]


@needs_library
def test_the_calls_that_are_spoiled_below_are_good() -> None:
    """Entries of block tables that no query needs may be anything."""
    attention = good_attention()
    cpu.sparse_attention(**attention)
    assert (attention["out"] != 0).all()
    assert (cpu.token_scores(**good_scores()) > 0).all()


@pytest.mark.parametrize(("name", "value", "message"), ATTENTION)
def test_attention_that_does_not_fit_is_refused(name: str, value: Any, message: str) -> None:
    given = good_attention()
    with pytest.raises(ValueError, match=message):
        cpu.sparse_attention(**given | {name: value})
    assert not given["out"].any()


@pytest.mark.parametrize(("name", "value", "message"), SCORES)
def test_scores_that_do_not_fit_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.token_scores(**good_scores() | {name: value})


@pytest.mark.parametrize(("last", "highest"), [(-1, False), (4, True)])
def test_the_last_queries_of_peaks_or_fewer_than_none_are_refused(last: int, highest: bool) -> None:
    with pytest.raises(ValueError, match=f"last is {last}, highest {highest}; expected 0 or more"):
        cpu.token_scores(**good_scores(), highest=highest, last=last)


@needs_library
def test_nothing_to_attend_or_to_score_needs_nothing_else() -> None:
    nobody = torch.zeros(0, 4, 32)
    none: Any = None
    out = torch.ones(0, 4, 32)
    cpu.sparse_attention(out, nobody, none, none, none, none, none, none, 0.0)
    scores = cpu.token_scores(nobody, none, none, none, none, 3, 0.0)
    assert (scores.tolist(), scores.dtype) == ([0.0, 0.0, 0.0], torch.float32)
    scores = cpu.token_scores(nobody, none, none, none, none, 3, 0.0, last=4)
    assert scores.tolist() == [[0.0] * 3] * 2
    scores = cpu.token_scores(torch.zeros(1, 4, 32), none, none, none, none, 0, 0.0)
    assert (scores.tolist(), scores.dtype) == ([], torch.float32)


@needs_library
def test_one_query_is_enough() -> None:
    given = good_attention()
    one = {name: given[name][:1] for name in ("out", "query", "request", "positions")}
    cpu.sparse_attention(**given | one)
    assert one["out"].all()
    assert not given["out"][1:].any()
    asked = good_scores()
    one = {name: asked[name][:1] for name in ("query", "positions")}
    scores = cpu.token_scores(**asked | one)
    assert (scores > 0).tolist() == [True] * 5 + [False] * 27


@needs_library
def test_tokens_behind_the_last_query_have_no_score() -> None:
    """Their blocks are not read; of fewer tokens than the queries see, these are scored."""
    given = good_scores()
    scores = cpu.token_scores(**given | {"num_tokens": 40})
    assert scores[32:].tolist() == [0.0] * 8
    assert torch.equal(scores[:32], cpu.token_scores(**given))
    few = cpu.token_scores(**given | {"num_tokens": 7})
    assert torch.equal(few, scores[:7])


@needs_library
def test_tables_and_queries_may_be_strided() -> None:
    """Copied where they are: vLLM's queries are columns of a wider product."""
    attention, views = good_attention(), good_attention()
    cpu.sparse_attention(**attention)
    tables = torch.full((2, 6), -1, dtype=torch.int32)
    tables[:, ::2] = attention["block_tables"]
    wide = torch.randn(4, 9, 32)
    wide[:, 3:7] = attention["query"]
    views |= {"pages": attention["pages"], "query": wide[:, 3:7], "block_tables": tables[:, ::2]}
    cpu.sparse_attention(**views)
    assert torch.equal(views["out"], attention["out"])


def test_values_on_a_device_are_not_read() -> None:
    """A GPU would have to wait for each; tensors without values stand for its own."""
    request, positions, tables = (
        torch.zeros(shape, dtype=dtype, device="meta")
        for shape, dtype in ((5, torch.int64), (5, torch.int64), ((2, 9), torch.int32))
    )
    query, pages = torch.zeros(5, 4, 8, device="meta"), torch.zeros(7, 256, device="meta")
    arguments.check_places(query, tables, request, positions, 16)
    arguments.check_positions(query, positions)
    arguments.check_blocks(tables[0], 3, pages)
    with pytest.raises(RuntimeError, match="meta"):
        int(positions[0])
