# SPDX-License-Identifier: Apache-2.0
"""Resident blocks become plans that stay in place, and end where the last of them does."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.test_planner import BUDGET, SIZE, World, blocks_of
from tests.policies.test_recipes import situation
from vllm_segreuse.cache.exact import ResidentFinder, resident_matches
from vllm_segreuse.plan import BoolArray, IntArray, Recipe, Stock
from vllm_segreuse.policies import exact
from vllm_segreuse.scheduling.tracked import TrackedRequest

RESIDENT = {0: 70, 1: 71, 3: 73, 4: 74, 6: 76}
"""Resident blocks of a prompt of nine and a half."""
FINDER = ResidentFinder(SIZE)


def resident_blocks(first: int, last: int) -> IntArray:
    return np.array([RESIDENT.get(i, -1) for i in range(first, last)], np.int32)


def stock(reused: BoolArray, segments: IntArray) -> Recipe:
    return exact.recipe(situation(reused.tolist()))


def request(world: World, **fields) -> TrackedRequest:
    tokens = world.new_tokens(9 * SIZE + 2)
    return world.request(
        tokens, resident_blocks=resident_blocks, make_recipe=stock, finder=FINDER, **fields
    )


@given(st.lists(st.integers(-1, 50), max_size=12), st.integers(0, 5), st.integers(1, 64))
def test_every_resident_block_is_copied_to_its_own_place(blocks, first, size) -> None:
    matches = resident_matches(np.array(blocks, np.int32), first, size)
    expected = [
        [(first + i) * size, size, block, 0, (first + i) * size]
        for i, block in enumerate(blocks)
        if block >= 0
    ]
    assert matches.pieces.rows() == expected
    assert matches.num_tokens == size * len(expected)
    marks = "".join("x" if block >= 0 else " " for block in blocks)
    assert matches.num_segments == len(marks.split())
    assert matches.max_depth == 0


def test_the_plan_ends_with_the_last_resident_block() -> None:
    world = World()
    tracked = request(world)
    assert world.decide(tracked, start=2 * SIZE) == 5 * SIZE
    report = world.planner.allocated(tracked, blocks_of(tracked))
    assert (report.reused_tokens, report.exact_tokens) == (3 * SIZE, 3 * SIZE)
    assert (report.prefix_tokens, report.recomputed_tokens) == (2 * SIZE, 0)
    assert (report.new_tokens, report.matches) == (4 * SIZE + 2, 2)
    assert world.pins.blocks == [73, 74, 76]
    (plan,) = world.end_step()
    assert world.pins.blocks == []
    assert plan.recipe.program == Stock()
    assert (plan.start, plan.stop) == (2 * SIZE, 7 * SIZE)
    assert plan.token_ids.tolist() == tracked.prompt.tokens[2 * SIZE : 7 * SIZE].tolist()
    holes = [hole for hole in range(2, 7) if hole not in RESIDENT]
    always = plan.recipe.always.reshape(-1, SIZE)
    assert np.flatnonzero(always.all(axis=1)).tolist() == [hole - 2 for hole in holes]
    assert plan.recipe.always.sum() == SIZE * len(holes) == plan.active_tokens


def test_a_block_that_the_prefix_hit_reaches_into_is_not_copied() -> None:
    world = World()
    tracked = request(world)
    start = 3 * SIZE + 1
    assert world.decide(tracked, start=start) == 7 * SIZE - start
    report = world.planner.allocated(tracked, blocks_of(tracked))
    assert (report.prefix_tokens, report.exact_tokens) == (start, 2 * SIZE)
    assert world.pins.blocks == [74, 76]
    (plan,) = world.end_step()
    assert plan.pieces.destination.tolist() == [4 * SIZE, 6 * SIZE]


def test_the_index_is_not_asked_and_the_match_not_kept() -> None:
    world = World()
    tokens, _ = world.document(9)
    world.end_step()
    nothing: dict[int, int] = {}

    def blocks(first: int, last: int) -> IntArray:
        return np.array([nothing.get(i, -1) for i in range(first, last)], np.int32)

    prompt = [*tokens, *world.new_tokens(2)]
    tracked = world.request(prompt, resident_blocks=blocks, finder=FINDER)
    assert world.decide(tracked) == 0
    assert tracked.decision.reason == "too_few_reused_tokens"
    nothing[8] = 5
    assert world.decide(tracked) == 9 * SIZE


def test_too_few_resident_tokens() -> None:
    world = World()
    tracked = request(world, min_reused_tokens=4 * SIZE)
    assert world.admit(tracked, start=2 * SIZE).bypass_reason == "too_few_reused_tokens"
    assert world.pins.pinned == 0


def test_the_work_per_step_is_bounded_as_for_any_plan() -> None:
    world = World()
    decided = [world.decide(request(world), start=2 * SIZE) for _ in range(30)]
    admitted = BUDGET // (2 * SIZE)  # two blocks of each are computed
    assert decided == [5 * SIZE] * admitted + [0] * (30 - admitted)
    assert world.planner.admission_closed


def test_nothing_behind_the_plan_is_exact() -> None:
    world = World()
    tracked = request(world)
    world.admit(tracked, start=2 * SIZE)
    # Copies do not donate: their originals do. What was computed is one step deeper.
    depths = world.donors.depths(tracked, 0, 9)
    assert depths.tolist() == [0, 0, 1, -1, -1, 1, -1, 1, 1]
