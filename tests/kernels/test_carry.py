# SPDX-License-Identifier: Apache-2.0
"""`carry`: shares of changes are added to the tokens behind, keys turned; in C++ the same bits."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import (
    DTYPES,
    ROTATIONS,
    assert_same,
    copy_of,
    make_cache,
    pairs_of,
    parts_of,
    shape_of,
)
from tests.kernels.carry_cases import TOKENS, before_of, carried_of, runs
from tests.prefill.pages import LAYOUTS
from vllm_segreuse.kernels import cpu, reference
from vllm_segreuse.kernels.page_tokens import read_tokens
from vllm_segreuse.kernels.pages import Part, Rotation


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", [*LAYOUTS, "NHD 8x128", "HND 2x80"])
@settings(max_examples=15)
@given(made=runs(), number=st.integers(0, 5), dtype=st.sampled_from(DTYPES))
def test_in_c_the_bits_are_the_references(
    name: str, made: list[tuple[int, int, int]], number: int, dtype: torch.dtype
) -> None:
    shape = shape_of(name)
    rotations = ROTATIONS[shape.keys.shape[2]]
    parts = parts_of(shape, rotations[number % len(rotations)])
    cache = make_cache(shape.page_elements, (TOKENS + 64) // shape.keys.shape[1], dtype)
    carried = carried_of(made, pairs_of(parts))
    before = before_of(parts, dtype)
    expected = copy_of(cache)
    reference.carry(expected.layers[0], parts, before, carried)
    cpu.carry(cache.layers[0], parts, before, carried)
    assert_same(cache.memory, expected.memory)


def test_a_token_takes_part_in_the_turned_change_of_its_row() -> None:
    shape = shape_of("HND 2x80")
    rotation = Rotation(80, False)
    parts = parts_of(shape, rotation)
    cache = make_cache(shape.page_elements, 16, torch.float32)
    carried = carried_of([(20, 9, 3), (40, 4, -1)], 40)
    old, before = before_of(parts), copy_of(cache)
    reference.carry(cache.layers[0], parts, old, carried)

    def held(of: Any, part: Part, slot: int) -> torch.Tensor:
        return read_tokens(of.layers[0], part.strides, torch.tensor([slot]))[0]

    changed = int(carried.changed[3])
    of_key, of_value = (
        held(before, part, changed) - one[3] for part, one in zip(parts, old, strict=True)
    )
    for i in range(9):
        angle = (i + 1) * torch.logspace(0, -4, 40).double()
        turned = torch.view_as_complex(of_key.view(2, 40, 2)).to(torch.complex128)
        turned = torch.view_as_real(turned * torch.polar(torch.ones(40).double(), angle))
        for part, moved, share in zip(
            parts, (turned.view(2, 80), of_value), carried.shares[:, i], strict=True
        ):
            expected = held(before, part, 20 + i) + share * moved
            torch.testing.assert_close(held(cache, part, 20 + i), expected.float())
    for part in parts:
        for slot in (19, 29, 40, 43, changed):
            assert torch.equal(held(cache, part, slot), held(before, part, slot))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slots": torch.tensor([0, 1, 10_000])}, "slots are from 0 to 10000"),
        ({"changed": torch.tensor([0, 1, 2, 3, -1])}, "changed are from -1 to 3"),
        ({"rows": torch.tensor([0, 5, 1])}, "rows are from 0 to 5; expected -1 to 4"),
        ({"distances": torch.tensor([1, 2, 99])}, "distances are from 1 to 99"),
        ({"rows": torch.tensor([0, 1])}, r"rows is \(2,\), of 3 tokens"),
        ({"shares": torch.rand(1, 3)}, r"shares are \(1, 3\); expected \(2, 3\)"),
        ({"cos": torch.rand(4, 7)}, r"cos is \(4, 7\), where 80 channels turn"),
        ({"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}, "slots must be contiguous"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, torch.Tensor], message: str) -> None:
    shape = shape_of("HND 2x80")
    parts = parts_of(shape, Rotation(80, False))
    cache = make_cache(shape.page_elements, 16, torch.float32)
    carried = dataclasses.replace(carried_of([(0, 3, 1)], 40), **wrong)
    with pytest.raises(ValueError, match=message):
        cpu.carry(cache.layers[0], parts, before_of(parts), carried)


def test_what_was_before_in_other_shapes_is_refused() -> None:
    shape = shape_of("HND 2x80")
    parts = parts_of(shape, None)
    cache = make_cache(shape.page_elements, 16, torch.float32)
    carried = carried_of([(0, 3, 1)], 0)
    with pytest.raises(ValueError, match=r"before is \(5, 2, 40\)"):
        cpu.carry(cache.layers[0], parts, [torch.randn(5, 2, 40)] * 2, carried)
    with pytest.raises(ValueError, match="2 parts were 1 before"):
        cpu.carry(cache.layers[0], parts, before_of(parts)[:1], carried)
