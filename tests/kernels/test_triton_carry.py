# SPDX-License-Identifier: Apache-2.0
"""The Triton `carry` agrees with the reference to the last bit."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import (
    BITS,
    CASES,
    DTYPES,
    Cache,
    assert_same,
    channel_tiles,
    copy_of,
    hnd,
    make_cache,
    mla,
    nhd,
    pairs_of,
    parts_of,
    shape_of,
)
from tests.kernels.carry_cases import ROWS, TOKENS, before_of, carried_of, runs, to_device
from tests.kernels.triton_running import DEVICE, require_triton
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import Carried, Part, Rotation

require_triton()

from vllm_segreuse.kernels import triton_carry  # noqa: E402
from vllm_segreuse.kernels.triton_carry import carry  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# Over the borders of tiles and pages, right behind one another, and one that takes part in nothing.
RUNS = [(3, 17, 2), (20, 5, -1), (30, 9, 0), (39, 6, 4)]


def a_cache(shape: Any, dtype: torch.dtype, gap: int = 16, start: int = 16) -> Cache:
    """With room for all slots of `carried_of`."""
    blocks = -(-(TOKENS + 64) // shape.keys.shape[1])
    return make_cache(shape.page_elements, blocks, dtype, 1, gap, start)


def assert_agrees(pages: Cache, parts: list[Part], carried: Carried) -> None:
    """`carry` changes the memory exactly as the reference does."""
    before = before_of(parts, pages.memory.dtype)
    mine, expected = copy_of(pages, DEVICE), copy_of(pages)
    reference.carry(expected.layers[0], parts, before, carried)
    old = [part.to(DEVICE) for part in before]
    carry(mine.layers[0], parts, old, to_device(carried, DEVICE))
    bits = BITS[pages.memory.dtype.itemsize]
    assert not torch.equal(expected.memory.view(bits), pages.memory.view(bits))
    assert_same(mine.memory.cpu(), expected.memory)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_smallest(dtype: torch.dtype, neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of channels in tiles, some of which do not turn, on both sides; more tokens than a
    program changes; also where sums are beyond the largest, and halfway between two numbers."""
    monkeypatch.setattr(triton_carry, "_TILE_BYTES", 1)
    shape = channel_tiles(2, 8, 24, 8)
    carried = carried_of(RUNS, 6)
    carried.shares[:, 4] = 64
    carried.shares[:, 5], carried.shares[:, 6] = 0.5, 0.25
    carried.cos[2:4], carried.sin[2:4] = (torch.randint(-16, 17, (2, 6)) / 16 for _ in range(2))
    assert_agrees(a_cache(shape, dtype), parts_of(shape, Rotation(12, neox, 4)), carried)


def test_the_smallest_of_latents() -> None:
    """Of MLA, whose keys are narrower than its values."""
    shape = mla(20, 12)
    parts = parts_of(shape, Rotation(12, False))
    assert_agrees(a_cache(shape, torch.bfloat16), parts, carried_of(RUNS, 6))


def test_the_smallest_of_keys_alone() -> None:
    """Of several heads; values stay as they are."""
    shape = hnd(3, 8, 20)
    carried = carried_of(RUNS, 6)
    carried = dataclasses.replace(carried, shares=carried.shares[:1].contiguous())
    parts = [Part(shape.keys, Rotation(12, True, 4))]
    assert_agrees(a_cache(shape, torch.float16), parts, carried)


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
    assert_agrees(a_cache(shape, dtype), parts, carried_of(RUNS, pairs_of(parts)))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_ties_are_rounded_to_even(dtype: torch.dtype, neox: bool) -> None:
    """Sixteenths of short numbers often lie halfway between two of them."""
    shape = nhd(2, 16, 32)
    pages = a_cache(shape, dtype)
    if dtype.itemsize > 1:
        pages.memory.copy_(torch.randint(-(1 << 12), 1 << 12, pages.memory.shape))
    carried = carried_of(RUNS, 16)
    for table in (carried.cos, carried.sin):
        table.copy_(torch.randint(-16, 17, table.shape) / 16)
    carried.shares.copy_(torch.randint(0, 5, carried.shares.shape) / 4)
    assert_agrees(pages, parts_of(shape, Rotation(32, neox)), carried)


@settings(max_examples=10)
@given(
    made=runs().filter(lambda made: any(row >= 0 for *_, row in made)),
    dtype=st.sampled_from(DTYPES),
    neox=st.booleans(),
    shuffled=st.booleans(),
)
def test_any_runs(
    made: list[tuple[int, int, int]], dtype: torch.dtype, neox: bool, shuffled: bool
) -> None:
    """Tokens may come in any order, at any distances."""
    shape = hnd(2, 16, 32)
    carried = carried_of(made, 12)
    if shuffled:
        order = torch.randperm(len(carried))
        rows, slots = carried.rows[order], carried.slots[order]
        carried = dataclasses.replace(carried, rows=rows, slots=slots)
    assert_agrees(a_cache(shape, dtype), parts_of(shape, Rotation(24, neox, 4)), carried)


@pytest.mark.parametrize(("start", "gap"), [(12, 16), (16, 4), (3, 5)])
def test_pages_need_not_be_aligned(start: int, gap: int) -> None:
    shape = nhd(3, 16, 32)
    pages = a_cache(shape, torch.bfloat16, gap, start)
    assert_agrees(pages, parts_of(shape, Rotation(32, True)), carried_of(RUNS, 16))


def test_a_chunk_of_the_changed_tokens_may_begin_anywhere() -> None:
    """As passes in chunks cut them."""
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    pages = a_cache(shape, torch.bfloat16)
    carried, before = carried_of(RUNS, 16), before_of(parts, torch.bfloat16)
    mine, expected = copy_of(pages, DEVICE), copy_of(pages)
    reference.carry(expected.layers[0], parts, before, carried)
    whole, old = to_device(carried, DEVICE), [part.to(DEVICE) for part in before]
    for first, last in ((0, 3), (3, ROWS)):
        within = (whole.rows >= first) & (whole.rows < last)
        rows = torch.where(within, whole.rows - first, -1)
        chunk = dataclasses.replace(whole, changed=whole.changed[first:last], rows=rows)
        carry(mine.layers[0], parts, [part[first:last] for part in old], chunk)
    assert_same(mine.memory.cpu(), expected.memory)


def test_the_smallest_whose_offsets_need_more_than_32_bits() -> None:
    """Two pages, more than 2**32 elements apart; what is between them is never touched."""
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    near = make_cache(shape.page_elements, 2, torch.float8_e4m3fn).layers[0].to(DEVICE)
    stride = (1 << 32) + 16
    memory = torch.empty(stride + shape.page_elements, dtype=torch.uint8, device=DEVICE)
    far = memory.view(near.dtype).as_strided(near.shape, (stride, 1))
    for page in range(2):
        far[page].copy_(near[page])
    carried = dataclasses.replace(
        carried_of([(4, 9, 1), (24, 6, 0)], 16), changed=torch.tensor([17, 2])
    )
    carried = to_device(carried, DEVICE)
    before = [part[:2].to(DEVICE) for part in before_of(parts, near.dtype)]
    for layer in (near, far):
        carry(layer, parts, before, carried)
    for part in parts:
        found, expected = (
            torch.stack([part.strides.tokens(page[None].cpu()) for page in layer])
            for layer in (far, near)
        )
        assert_same(found, expected)


@pytest.mark.parametrize("rows", [ROWS, 0])
def test_nothing_to_carry_changes_nothing(rows: int) -> None:
    """No tokens at all, and none that takes part."""
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    pages = copy_of(a_cache(shape, torch.float16), DEVICE)
    held = pages.memory.clone()
    before = [part[:rows].to(DEVICE) for part in before_of(parts, torch.float16)]
    made = carried_of([(0, 9, -1)], 16)
    none = torch.empty(0, dtype=torch.int64)
    empty = dataclasses.replace(
        made, slots=none, rows=none, distances=none, shares=torch.empty(2, 0)
    )
    for one in (made, empty):
        one = dataclasses.replace(one, changed=one.changed[:rows])
        carry(pages.layers[0], parts, before, to_device(one, DEVICE))
    assert torch.equal(pages.memory, held)


def changed(**changes: Any) -> Any:
    return lambda pages, parts, before, carried: (
        *(pages, parts, before),
        dataclasses.replace(carried, **changes),
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "dtype": (lambda pages, *rest: (pages.int(), *rest), "pages are torch.int32"),
    "pages": (lambda pages, *rest: (pages[:, ::2], *rest), "with unit stride"),
    "parts": (lambda pages, parts, *rest: (pages, 3 * parts[:1], *rest), "3 parts given"),
    "before": (
        lambda pages, parts, before, carried: (pages, parts, before[:1], carried),
        "2 parts were 1 before",
    ),
    "table": (changed(cos=torch.zeros(7, 4, device=DEVICE)), r"cos is \(7, 4\)"),
    "types": (changed(rows=torch.zeros(37, device=DEVICE).int()), "not torch.int32"),
    "count": (changed(rows=torch.arange(8, device=DEVICE)), r"rows is \(8,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    spoil, message = REFUSED[name]
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    pages = copy_of(a_cache(shape, torch.bfloat16), DEVICE).layers[0]
    before = [part.to(DEVICE) for part in before_of(parts, torch.bfloat16)]
    carried = to_device(carried_of(RUNS, 16), DEVICE)
    with pytest.raises(ValueError, match=message):
        carry(*spoil(pages, parts, before, carried))


def test_parts_of_other_heads_are_refused() -> None:
    one, other = nhd(2, 16, 32), nhd(4, 16, 16)
    parts = [Part(one.keys, None), Part(other.values, None)]
    pages = copy_of(a_cache(one, torch.bfloat16), DEVICE).layers[0]
    before = [part.to(DEVICE) for part in before_of(parts, torch.bfloat16)]
    with pytest.raises(ValueError, match="2 and 4 heads"):
        carry(pages, parts, before, to_device(carried_of(RUNS, 16), DEVICE))
