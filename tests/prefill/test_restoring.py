# SPDX-License-Identifier: Apache-2.0
"""Restored blocks are the same bytes, at all layers, before anything of a pass reads them; where
copies cannot be relied on, they are computed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_executor import DONOR, NAN, RECIPES, assert_equal, pages, plan, spoils_donor
from tests.prefill.tiny import SIZE, World
from vllm_segreuse.plan import IntArray, Pieces, PlanOutcome, Recipe, Restoration, ReusePlan, Tier
from vllm_segreuse.prefill import backlog
from vllm_segreuse.prefill.align import block_copies
from vllm_segreuse.prefill.chunks import finish
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.mover import LoadedRows

SOURCES = (80, 82)
"""What the first two blocks of a plan are restored from."""
NUMBER = 7


def restoring(whole: ReusePlan, tier: Tier = Tier.GPU) -> ReusePlan:
    """The same plan behind two blocks that are restored; its own tokens move up by one block."""
    moved = replace(whole.pieces, destination=whole.pieces.destination + np.int32(SIZE))
    table = [(i * SIZE, SIZE, source, 0, i * SIZE) for i, source in enumerate(SOURCES)]
    ids = np.arange(30, 30 + 2 * SIZE, dtype=np.int32)
    return replace(
        whole,
        start=whole.start + SIZE,
        stop=whole.stop + SIZE,
        pieces=moved,
        block_ids=np.append(whole.block_ids, whole.block_ids[-1] + 1),
        restoration=Restoration(NUMBER, Pieces.from_table(table, tier), ids),
        reports=True,
    )


def behind_a_hit(restored: ReusePlan) -> ReusePlan:
    """The same, where vLLM has the blocks."""
    return replace(restored, restoration=None)


def filled(world: World, restored: ReusePlan) -> World:
    """With what is restored where it belongs."""
    for cache in world.caches:
        cache[restored.block_ids[:2].tolist()] = cache[list(SOURCES)]
    return world


class Rows:
    """Rows 80 to 99 hold what these blocks hold; a few of them fit on the device."""

    def __init__(self, world: World, room: int) -> None:
        self._pages = [cache.reshape(len(cache), -1).clone() for cache in world.caches]
        self._room = room
        for cache in world.caches:
            cache[list(SOURCES)] = NAN

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        for first in range(0, len(rows), self._room):
            chunk = rows[first : first + self._room].tolist()
            held = [layer[chunk].flip(0) for layer in self._pages]
            slots = len(chunk) - 1 - np.arange(len(chunk))
            yield LoadedRows(first, first + len(chunk), held, slots)
            for layer in held:
                layer.fill_(NAN)  # by whoever comes next


def reading(world: World, rows: Any) -> SparsePrefill:
    """The world's pass, with a second tier."""
    return world.prefill.with_aligner(world.prefill.aligner.reading(rows))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_pass_behind_it_is_that_behind_a_prefix_hit(
    room: int, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = restoring(plan("one", 10, **recipe), Tier.HOST if room else Tier.GPU)
    reference = filled(World(monkeypatch), restored)
    expected = reference.prefill.run([behind_a_hit(restored)]).outcomes["one"]
    world = World(monkeypatch)
    if room:
        world.prefill = reading(world, Rows(world, room))
    report = world.prefill.run([restored])
    assert_equal(pages(world, restored), pages(reference, restored))
    assert report.outcomes["one"] == expected._replace(restoration=NUMBER, is_restored=True)


def test_two_plans_may_restore_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    wanted = [cache[list(SOURCES)].clone() for cache in world.caches]
    world.prefill = reading(world, Rows(world, 1))
    plans = [restoring(plan(name, first), Tier.HOST) for name, first in (("a", 10), ("b", 40))]
    world.prefill.run(plans)
    for each in plans:
        for cache, held in zip(world.caches, wanted, strict=True):
            assert torch.equal(cache[each.block_ids[:2].tolist()], held)


def test_what_follows_a_prefix_hit_is_restored_behind_it() -> None:
    first = alone()
    assert first.restoration is not None
    pieces = first.restoration.pieces
    moved = replace(
        pieces, destination=pieces.destination + 2 * SIZE, position=pieces.position + 2 * SIZE
    )
    behind = replace(
        first,
        start=first.start + 2 * SIZE,
        stop=first.stop + 2 * SIZE,
        block_ids=np.concatenate(([90, 91], first.block_ids)),
        restoration=replace(first.restoration, pieces=moved),
    )
    copies = block_copies([behind, plan("other", 30), first], SIZE)
    assert copies.targets.tolist() == [*first.block_ids[:2], *first.block_ids[:2]]
    assert copies.sources.tolist() == [*SOURCES, *SOURCES]


def alone() -> ReusePlan:
    """A plan that restores, and nothing else."""
    whole = restoring(plan("one", 10))
    nothing = np.zeros(0, np.bool_)
    return replace(
        whole,
        stop=whole.start,
        token_ids=whole.token_ids[:0],
        pieces=whole.pieces.where(np.zeros(len(whole.pieces), np.bool_)),
        recipe=Recipe.without_choice(nothing),
    )


def test_a_plan_may_consist_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world, reference = World(monkeypatch), World(monkeypatch)
    both = [alone(), plan("other", 30)]
    report = world.prefill.run(both)
    filled(reference, both[0]).prefill.run([both[1]])
    assert report.outcomes == {"one": PlanOutcome(0, restoration=NUMBER, is_restored=True)}
    for each in both:
        assert_equal(pages(world, each), pages(reference, each))
    assert World(monkeypatch).prefill.run([alone()]).not_finite == []


def test_what_is_not_finite_costs_the_restored_blocks_their_trust(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restored = restoring(plan("one", 10))
    full = World(monkeypatch)
    full.prefill.run([restored.without_copies()])
    world = World(monkeypatch)
    spoils_donor(0, 0, NAN)(world)
    report = world.prefill.run([restored])
    assert report.not_finite == ["one"]
    assert report.outcomes["one"] == PlanOutcome(28, restoration=NUMBER)
    assert restored.recomputed_after(report.outcomes["one"]) == 2 * SIZE + 16
    assert_equal(pages(world, restored), pages(full, restored))


def test_drift_is_of_segments_and_leaves_what_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"top_k": 4, "program": RECIPES["late"]["program"]}
    restored = replace(restoring(plan("one", 10, **late)), max_drift=0.0)
    world = World(monkeypatch)
    outcome = world.prefill.run([restored]).outcomes["one"]
    assert outcome.in_full
    assert outcome.is_restored
    for cache in world.caches:
        assert torch.equal(cache[restored.block_ids[:2].tolist()], cache[list(SOURCES)])


@pytest.mark.parametrize("make", [alone, lambda: restoring(plan("one", 10))], ids=["alone", "more"])
def test_rows_that_cannot_be_read_are_computed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "_is_alone", lambda: True)
    restored = make()
    world, full = World(monkeypatch), World(monkeypatch)

    def fail(rows: IntArray) -> None:
        raise OSError("cannot read")

    rows: Any = Rows(world, 1)
    rows.load = fail
    world.prefill = reading(world, rows)
    failing = replace(
        restored,
        restoration=replace(
            restored.restoration,
            pieces=replace(
                restored.restoration.pieces,
                source=np.full(len(SOURCES), Tier.HOST, np.int8),
            ),
        ),
    )
    prepared = backlog.prepare_or_in_full(world.prefill, [failing])
    outcome = finish(backlog.compute_or_in_full(world.prefill, prepared)).outcomes["one"]
    full.prefill.run([restored.without_copies()])
    assert outcome == PlanOutcome(restored.stop, restoration=NUMBER)
    assert_equal(pages(world, restored), pages(full, restored))
    assert DONOR not in restored.block_ids
