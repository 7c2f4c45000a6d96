# SPDX-License-Identifier: Apache-2.0
"""Aligning plans agrees with a loop over their tokens, wherever sources and targets lie."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.prefill.pages import BLOCK_SIZE, HEAD_SIZE, Layer, make_layer
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.pages import PageLayout
from vllm_segreuse.model.kv_layout import discover_layout
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.plan import IntArray, Pieces, Recipe, ReusePlan, Tier
from vllm_segreuse.prefill import align as align_module
from vllm_segreuse.prefill.align import Aligner, token_copies
from vllm_segreuse.prefill.mover import LoadedRows

NUM_BLOCKS = 12
NUM_LAYERS = 3
ROPE = DeltaRope(torch.logspace(0, -4, HEAD_SIZE // 2, dtype=torch.float64), HEAD_SIZE, True)


class Copy(NamedTuple):
    """One token: where from, where to, and how far it moves."""

    source: int
    target: int
    distance: int
    always: bool
    tier: int


@st.composite
def plans(draw: st.DrawFn) -> list[ReusePlan]:
    """Up to three plans with targets of their own and sources anywhere, targets included; some of
    them in rows of the host's."""
    blocks = draw(st.permutations(range(NUM_BLOCKS)))
    made = []
    for number in range(draw(st.integers(1, 3))):
        table = blocks[3 * number : 3 * number + 3]
        start = draw(st.integers(0, 1)) * BLOCK_SIZE
        stop = draw(st.integers(start + 1, 3 * BLOCK_SIZE))
        pieces, position = [], start
        while position < stop:
            position += draw(st.integers(0, 20))
            length = min(draw(st.integers(1, BLOCK_SIZE)), stop - position)
            if length <= 0:
                break
            offset = draw(st.integers(0, BLOCK_SIZE - length))
            block, donor = draw(st.integers(0, NUM_BLOCKS - 1)), draw(st.integers(0, 5000))
            pieces.append((position, length, block, offset, donor))
            position += length
        always = np.array(
            draw(st.lists(st.booleans(), min_size=stop - start, max_size=stop - start)), np.bool_
        )
        recipe = Recipe.without_choice(always)
        tiers = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
        found = replace(Pieces.from_table(pieces), source=np.array(tiers, np.int8))
        made.append(
            ReusePlan(
                f"request {number}",
                start,
                stop,
                np.zeros(stop - start, np.int32),
                found,
                recipe,
                [],
                0,
                np.array(table, np.int32),
            )
        )
    return made


def copies_of(made: list[ReusePlan]) -> list[Copy]:
    """Token by token, as the pieces say."""
    copies = []
    for plan in made:
        rows = zip(plan.pieces.rows(), plan.pieces.source, strict=True)
        for (destination, length, block, offset, position), tier in rows:
            for i in range(length):
                to = destination + i
                slot = int(plan.block_ids[to // BLOCK_SIZE]) * BLOCK_SIZE + to % BLOCK_SIZE
                always = bool(plan.recipe.always[to - plan.start])
                source = block * BLOCK_SIZE + offset + i
                copies.append(Copy(source, slot, destination - position, always, int(tier)))
    return copies


@given(plans(), st.booleans())
def test_copies_are_those_of_the_pieces(made: list[ReusePlan], skip_always: bool) -> None:
    found = token_copies(made, BLOCK_SIZE, skip_always)
    expected = [c for c in copies_of(made) if not (skip_always and c.always)]
    assert found.source_slots.tolist() == [c.source for c in expected]
    assert found.target_slots.tolist() == [c.target for c in expected]
    assert found.deltas.tolist() == [c.distance for c in expected]
    assert found.tiers.tolist() == [c.tier for c in expected]
    assert len(found) == len(expected)


def make_aligner(layouts: list[str], ropes: list[DeltaRope | None]) -> tuple[Aligner, list[Layer]]:
    layers = [make_layer(layout, NUM_BLOCKS) for layout in layouts]
    found = [discover_layout(layer, BLOCK_SIZE) for layer in layers]
    for layer in layers:
        layer.log.clear()
    return Aligner(known(layers, found, ropes)), layers


def known(
    layers: list[Layer],
    found: list[PageLayout],
    ropes: list[DeltaRope | None],
    align: Any = reference.align,
) -> list[LayerKv]:
    """With a kernel that aligns, and no other."""
    nothing: Any = None
    kernels = Kernels(align, reference.store, nothing, None, None, "")
    return [LayerKv(*each, kernels) for each in zip(layers, found, ropes, strict=True)]


@pytest.fixture(scope="module")
def aligner() -> tuple[Aligner, list[Layer]]:
    return make_aligner(LAYOUTS, [ROPE, None, ROPE])


class Rows:
    """Rows of the host's; a device that has room for a few of them reads them elsewhere."""

    def __init__(self, layers: list[Layer], room: int) -> None:
        self.layers, self._room = [make_layer(name, NUM_BLOCKS) for name in LAYOUTS], room
        assert len(self.layers) == len(layers)

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        for first in range(0, len(rows), self._room):
            chunk = rows[first : first + self._room]
            slots = self._room - 1 - np.arange(len(chunk))
            pages = [
                torch.full((self._room, *layer.pages.shape[1:]), torch.nan) for layer in self.layers
            ]
            for copy, layer in zip(pages, self.layers, strict=True):
                copy[slots] = layer.pages[chunk]
            yield LoadedRows(first, first + len(chunk), pages, slots)
            for copy in pages:
                copy.fill_(torch.nan)  # overwritten by whoever comes next


LAYOUTS = ["HND", "tiled by 32", "pairs"]


@given(made=plans(), first_layer=st.integers(0, NUM_LAYERS), room=st.integers(1, 5))
def test_aligning_agrees_with_a_loop(
    aligner: tuple[Aligner, list[Layer]], made: list[ReusePlan], first_layer: int, room: int
) -> None:
    """Also where targets of one plan are sources of another, or of itself; and where some tokens
    come from rows of the host's."""
    subject, layers = aligner
    rows = Rows(layers, room)
    subject = subject.reading(rows)  # type: ignore[arg-type]
    before = [layer.pages.clone() for layer in layers]
    expected = [loop(layer, rows.layers[i], made, i) for i, layer in enumerate(layers)]
    subject.align(token_copies(made, BLOCK_SIZE, skip_always=True), first_layer)
    for i, layer in enumerate(layers):
        wanted = expected[i] if i >= first_layer else before[i]
        torch.testing.assert_close(layer.pages, wanted, atol=1e-4, rtol=0)


def loop(layer: Layer, rows: Layer, made: list[ReusePlan], index: int) -> torch.Tensor:
    """The cache after copying token by token, from an untouched original."""
    original = Layer(layer.pages.clone(), layer.key_at, layer.value_at)
    result = Layer(layer.pages.clone(), layer.key_at, layer.value_at)
    for copy in copies_of(made):
        if copy.always:
            continue
        key, value = (rows if copy.tier == Tier.HOST else original).read(copy.source)
        if index != 1:  # the layer without positions
            key = turned(key, copy.distance)
        slot = torch.tensor([copy.target])
        result.write(result, key[None], value[None], result.kv_cache, slot)
    return result.pages


def test_whole_blocks_are_copied_to_the_pages_of_their_own_layer() -> None:
    subject, layers = make_aligner(["HND", "NHD", "HND"], [ROPE] * 3)
    rows = [torch.zeros(5, layer.pages.shape[1]) for layer in layers]
    subject.copy_blocks(rows, np.array([7, 2]), np.array([0, 4]))
    for copy, layer in zip(rows, layers, strict=True):
        assert torch.equal(copy[[0, 4]], layer.pages[[7, 2]])
        assert not copy[1:4].any()


def test_rows_are_not_read_where_there_are_none() -> None:
    subject, _ = make_aligner(["NHD"], [ROPE])
    slots = np.arange(9)
    copies = align_module.TokenCopies.at_all_layers(slots, slots + 500, slots)
    with pytest.raises(RuntimeError, match="no second tier"):
        subject.align(replace(copies, tiers=np.full(9, Tier.HOST, np.int8)))


def turned(key: torch.Tensor, distance: int) -> torch.Tensor:
    """One key `[head, channel]` rotated as complex numbers."""
    half = HEAD_SIZE // 2
    number = torch.complex(key[:, :half].double(), key[:, half:].double())
    number = number * torch.polar(
        torch.ones(half, dtype=torch.float64), ROPE.frequencies * distance
    )
    return torch.cat([number.real, number.imag], dim=1).float()


def test_nothing_to_copy_touches_nothing() -> None:
    subject, layers = make_aligner(["NHD"], [ROPE])
    before = layers[0].pages.clone()
    empty = np.empty(0, np.int64)
    subject.align(align_module.TokenCopies.at_all_layers(empty, empty, empty))
    assert torch.equal(layers[0].pages, before)
    assert layers[0].log == []


def test_unmoved_tokens_are_copied_bit_for_bit() -> None:
    subject, layers = make_aligner(["tiled by 16"], [ROPE])
    source, target = np.arange(70, 190), np.arange(300, 420)
    expected = [layers[0].read(slot) for slot in source.tolist()]
    subject.align(align_module.TokenCopies.at_all_layers(source, target, np.zeros_like(source)))
    for slot, (key, value) in zip(target.tolist(), expected, strict=True):
        assert torch.equal(layers[0].read(slot)[0], key)
        assert torch.equal(layers[0].read(slot)[1], value)


@pytest.mark.parametrize(("distance", "overlapping"), [(63, True), (64, False)])
def test_the_kernel_is_told_where_pages_are_both_read_and_written(
    distance: int, overlapping: bool
) -> None:
    told = []
    layer = make_layer("HND", NUM_BLOCKS)
    found = discover_layout(layer, BLOCK_SIZE)
    subject = Aligner(
        known([layer], [found], [ROPE], lambda pages, parts, moves: told.append(moves))
    )
    source = np.arange(BLOCK_SIZE)
    subject.align(
        align_module.TokenCopies.at_all_layers(source, source + distance, np.zeros_like(source))
    )
    assert [moves.overlapping for moves in told] == [overlapping]


def test_layers_that_are_alike_are_aligned_by_one_call() -> None:
    calls = []
    layers = [make_layer(name, NUM_BLOCKS) for name in ("HND", "NHD", "HND", "HND")]
    found = [discover_layout(layer, BLOCK_SIZE) for layer in layers]
    other = DeltaRope(ROPE.frequencies / 4, HEAD_SIZE, True)
    ropes = [ROPE, ROPE, DeltaRope(ROPE.frequencies.clone(), HEAD_SIZE, True), other]
    subject = Aligner(
        known(layers, found, ropes, lambda pages, parts, moves: calls.append(len(pages)))
    )
    slots = np.arange(9)
    subject.align(align_module.TokenCopies.at_all_layers(slots, slots + 500, slots))
    assert calls == [2, 1, 1]
    calls.clear()
    subject.align(align_module.TokenCopies.at_all_layers(slots, slots + 500, slots), first_layer=2)
    assert calls == [1, 1]
