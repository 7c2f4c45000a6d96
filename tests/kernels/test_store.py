# SPDX-License-Identifier: Apache-2.0
"""Whole pages go to rows of other memory bit for bit, and `align` brings them back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import (
    BITS,
    DTYPES,
    Cache,
    copy_of,
    good_call,
    hnd,
    make_cache,
    make_region,
    parts_of,
)
from vllm_segreuse.kernels import cpu, cpu_store, reference
from vllm_segreuse.kernels.codecs import Codec, EncodedPage
from vllm_segreuse.kernels.pages import Moves

SHAPE = hnd(2, 16, 32)
BLOCKS, ROWS = torch.tensor([4, 0, 1]), torch.tensor([2, 6, 0])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def any_bits(cache: Cache) -> Cache:
    bits = BITS[cache.memory.dtype.itemsize]
    cache.memory.view(bits).copy_(torch.randint(-(1 << 31), 1 << 31, cache.memory.shape).to(bits))
    return cache


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.dtype.itemsize])


def assert_stored(store: Callable[..., None], dtype: torch.dtype, start: int) -> None:
    """Every bit pattern; nothing beside the rows changes."""
    pages = any_bits(make_cache(SHAPE.page_elements, 5, dtype, num_layers=3, gap=start))
    region = any_bits(make_region(SHAPE.page_elements, 7, dtype, 3, start))
    expected = copy_of(region)
    for layer, cell in zip(pages.layers, expected.layers, strict=True):
        for block, row in zip(BLOCKS, ROWS, strict=True):
            raw(cell)[row] = raw(layer)[block]
    store(pages.layers, region.layers, BLOCKS, ROWS)
    assert torch.equal(raw(region.memory), raw(expected.memory))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference(dtype: torch.dtype) -> None:
    assert_stored(reference.store, dtype, 3)


@pytest.mark.parametrize("start", [32, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library(built: str, threads: int, dtype: torch.dtype, start: int) -> None:
    assert_stored(cpu_store.store, dtype, start)


def test_what_was_stored_is_read_by_align(built: str) -> None:
    pages = make_cache(SHAPE.page_elements, 5, torch.bfloat16, num_layers=3)
    before = copy_of(pages)
    region = make_region(SHAPE.page_elements, 7, torch.bfloat16, 3)
    cpu_store.store(pages.layers, region.layers, BLOCKS, ROWS)
    sources = (ROWS[:, None] * 16 + torch.arange(16)).flatten()
    targets = (BLOCKS.flip(0)[:, None] * 16 + torch.arange(16)).flatten()
    angles, tables = torch.zeros(48, dtype=torch.int64), torch.zeros(1, 0)
    moves = Moves(sources, targets, angles, tables, tables)
    cpu.align(pages.layers, parts_of(SHAPE, None), moves, region.layers)
    for layer, old in zip(pages.layers, before.layers, strict=True):
        assert torch.equal(layer[BLOCKS.flip(0)], old[BLOCKS])


def test_one_layer_is_stored_by_itself(built: str) -> None:
    pages = make_cache(SHAPE.page_elements, 5, torch.bfloat16).layers
    cells = make_region(SHAPE.page_elements, 7, torch.bfloat16).layers
    cpu_store.store(pages, cells, BLOCKS, ROWS)
    assert torch.equal(cells[0][ROWS], pages[0][BLOCKS])
    parts = parts_of(SHAPE, None)
    place = EncodedPage.of(SHAPE.keys.shape, SHAPE.values.shape, SHAPE.page_elements)
    coded = [torch.zeros(7, place.size, dtype=torch.uint8)]
    assert cpu_store.encode(pages, parts, Codec.INT8, BLOCKS, coded, ROWS).all()
    moves = Moves(*torch.tensor([[2 * 16], [3 * 16], [0]]), *torch.zeros(2, 1, 0))
    cpu.align(pages, parts, moves, coded, Codec.INT8)
    first = SHAPE.keys.tokens(pages[0])
    torch.testing.assert_close(first[3 * 16], first[4 * 16], rtol=0.02, atol=0.2)


def test_nothing_to_store_changes_nothing() -> None:
    pages, _, _ = good_call()
    before = [page.clone() for page in pages]
    nothing = torch.zeros(0, dtype=torch.int64)
    cpu_store.store(pages, pages, nothing, nothing)
    cpu_store.store([], [], BLOCKS, ROWS)
    assert all(map(torch.equal, pages, before))


def test_nothing_to_encode_is_encoded() -> None:
    """Of no layers every block; of no blocks none."""
    pages, parts, _ = good_call()
    nothing = torch.zeros(0, dtype=torch.int64)
    found = cpu_store.encode(pages, parts, Codec.INT8, nothing, [], nothing)
    assert (found.tolist(), found.dtype) == ([], torch.bool)
    found = cpu_store.encode([], parts, Codec.INT8, BLOCKS, [], ROWS)
    assert (found.tolist(), found.dtype) == ([True, True, True], torch.bool)


REFUSED: dict[str, tuple[Callable[..., tuple[Any, ...]], str]] = {
    "blocks behind the pages": (lambda p, c, b, r: (p, c, b + 2, r), "blocks are from 2 to 6"),
    "rows before the first": (lambda p, c, b, r: (p, c, b, r - 1), "rows are from -1 to 5"),
    "rows behind the last": (lambda p, c, b, r: (p, c, b, r + 1), "rows are from 1 to 7"),
    "int32": (lambda p, c, b, r: (p, c, b.int(), r), "blocks must be contiguous torch.int64"),
    "fewer rows": (lambda p, c, b, r: (p, c, b, r[:2]), "rows is .2,., of 3"),
    "layers": (lambda p, c, b, r: (p, c[:1], b, r), "sources are of 1 layers, pages of 3"),
    "page size": (lambda p, c, b, r: (p, [x[:, :9] for x in c], b, r), "must be those of pages"),
    "device": (lambda p, c, b, r: ([x.to("meta") for x in p], c, b, r), "pages are on meta"),
}


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    spoil, message = REFUSED[name]
    pages = make_cache(SHAPE.page_elements, 5, torch.bfloat16, num_layers=3)
    region = make_region(SHAPE.page_elements, 7, torch.bfloat16, 3)
    before = region.memory.clone()
    with pytest.raises(ValueError, match=message):
        cpu_store.store(*spoil(pages.layers, region.layers, BLOCKS, ROWS))
    assert torch.equal(raw(region.memory), raw(before))
