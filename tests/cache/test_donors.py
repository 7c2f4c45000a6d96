# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request donate in turn, and how deep their provenance is."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.test_planner import MAX_DEPTH, SIZE, World, at_most_all, half_by_score
from vllm_segreuse.plan import (
    BoolArray,
    Boundary,
    IntArray,
    Pieces,
    Recipe,
    ReusePlan,
    fates_of,
)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def document(world: World) -> tuple[list[int], list[int]]:
    tokens, blocks = world.document(3)
    world.end_step()
    return tokens, blocks


def plan_of(start: int, always: Sequence[bool], reused: Sequence[bool], depth: int) -> ReusePlan:
    where = np.flatnonzero(reused)
    pieces = Pieces.from_table([(start + at, 1, 0, 0, 0) for at in where])
    mask = np.array(always, np.bool_)
    recipe = Recipe.without_choice(mask)
    tokens = np.zeros(len(mask), np.int32)
    return ReusePlan("r", start, start + len(mask), tokens, pieces, recipe, [], depth)


def expected_depth(plan: ReusePlan, block: int) -> int:
    """Token by token."""
    if (block + 1) * SIZE <= plan.start:
        return 0
    in_full = plan.num_recomputed == plan.num_reused
    for position in range(block * SIZE, (block + 1) * SIZE):
        inside = plan.start <= position < plan.stop
        if inside and not in_full and not plan.recipe.always[position - plan.start]:
            return -1
    return plan.donor_depth + 1 if plan.donor_depth < MAX_DEPTH else -1


@given(
    start=st.integers(0, 3 * SIZE),
    tokens=st.lists(st.sampled_from(["new", "reused", "again"]), min_size=1, max_size=8 * SIZE),
    depth=st.integers(0, MAX_DEPTH),
    first=st.integers(0, 8),
    number=st.integers(1, 8),
)
def test_donor_depths_agree_with_a_loop_over_tokens(start, tokens, depth, first, number):
    world = World(1)
    plan = plan_of(start, [t != "reused" for t in tokens], [t != "new" for t in tokens], depth)
    tracked = world.request([1])
    tracked.plan = plan
    depths = world.donors.depths(tracked, first, number)
    assert depths.tolist() == [expected_depth(plan, first + i) for i in range(number)]


def test_a_request_without_a_plan_donates_exact_blocks(world):
    tracked = world.request(world.new_tokens(9))
    assert world.donors.depths(tracked, 3, 4).tolist() == [0, 0, 0, 0]


def test_tokens_chosen_by_score_do_not_donate_unless_all_are_chosen(world, document):
    prompt = world.new_tokens(4) + document[0] + world.new_tokens(5)
    tracked = world.request(prompt, make_recipe=half_by_score)
    world.admit(tracked)
    assert world.donors.depths(tracked, 0, 6).tolist() == [1, -1, -1, -1, 1, 1]
    world.end_step()

    def all_by_score(reused: BoolArray, _: IntArray) -> Recipe:
        return Recipe.of(Boundary(), fates_of(~reused, ~reused), int(reused.sum()))

    tracked = world.request(prompt, make_recipe=all_by_score)
    world.admit(tracked)
    assert world.donors.depths(tracked, 0, 6).tolist() == [1] * 6


def test_tokens_that_may_be_chosen_but_need_not_be_do_not_donate(world, document):
    """Only the workers know which they were: a copy must not pass for computed."""
    prompt = world.new_tokens(4) + document[0] + world.new_tokens(5)
    tracked = world.request(prompt, make_recipe=at_most_all)
    report = world.admit(tracked)
    assert report.recomputed_tokens == report.reused_tokens == 12, "the most there can be"
    assert tracked.plan is not None
    assert tracked.plan.reports
    assert world.donors.depths(tracked, 0, 6).tolist() == [1, -1, -1, -1, 1, 1]
    world.end_step()
    known = world.request(prompt, make_recipe=half_by_score)
    world.admit(known)
    assert known.plan is not None
    assert not known.plan.reports


@pytest.mark.parametrize("spread", [False, True])
def test_what_vllm_computes_behind_a_plan_donates(
    world: World, document: tuple[list[int], list[int]], spread: bool
) -> None:
    """It names the block of these tokens when it computes them, not before."""
    world.spread = spread
    prompt = world.new_tokens(4) + document[0] + world.new_tokens(8)
    tracked = world.request(prompt, make_recipe=half_by_score)
    world.admit(tracked)
    assert world.donors.depths(tracked, 0, 7).tolist() == [1, -1, -1, -1, 1, 1, 1]


@pytest.mark.parametrize(("first_token", "context"), [(0, 0), (3, 0), (4, 1), (11, 2)])
def test_what_a_document_is_computed_behind_does_not_donate(world, first_token, context):
    """It stays vLLM's, which computes it once for all documents of a base."""
    tracked = world.request(world.new_tokens(4 * SIZE))
    tracked.donates_from = first_token
    assert world.donors.depths(tracked, 0, 4).tolist() == [-1] * context + [0] * (4 - context)
    assert world.donors.depths(tracked, 1, 2).tolist() == ([-1] * context + [0] * 4)[1:3]
    blocks = [200, 201, 202, 203]
    world.donors.index_prefix(tracked, tracked.prompt.tokens, blocks)
    assert [block in world.index for block in blocks] == [n >= context for n in range(4)]
