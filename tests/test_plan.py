# SPDX-License-Identifier: Apache-2.0
"""What a plan says of itself, counted by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_segreuse.plan import (
    AcceptanceOutcome,
    BoolArray,
    Boundary,
    Check,
    Counts,
    Deviation,
    Fate,
    Fixed,
    Gather,
    ModelLayers,
    Pieces,
    PlanOutcome,
    Probed,
    Program,
    Recipe,
    ReusePlan,
    Staged,
    Stock,
    fates_of,
    second_round,
    staged,
)

START = 8
NEW = {0, 1, 6, 9}
"""Tokens of ten, counted from the start, that are not reused."""
LAYERS = 5
MODEL = ModelLayers.of_full_attention(LAYERS)

SUM, MAX, ABOVE = Probed(Gather.SUM), Probed(Gather.MAX), Probed(Gather.MAX, 0.1)
PROGRAMS = [Fixed(), Fixed(2), Stock(), Boundary(), Boundary(2), Deviation(1), SUM, MAX, ABOVE]


def mask(of: set[int]) -> BoolArray:
    return np.isin(np.arange(10), list(of))


def plan(
    program: Program = PROGRAMS[0],
    again: set[int] = frozenset(),
    top_k: int = 0,
    next_token: int | None = None,
) -> ReusePlan:
    """Ten tokens, six of them reused; the probes are the two at the end that are new."""
    recipe = Recipe.of(program, fates_of(mask(NEW | again), mask({6, 9})), top_k)
    found = Pieces.from_table([(START + 2, 4, 70, 0, 30), (START + 7, 2, 71, 0, 90)])
    tokens = np.arange(10, dtype=np.int32)
    return ReusePlan("r", START, START + 10, tokens, found, recipe, [70, 71], 0, None, next_token)


def test_new_text_that_is_computed_once_stands_before_the_probes() -> None:
    """A probe has no keys and values at the last layers before the choice."""
    new, first = mask({1, 6}), mask({1})
    with pytest.raises(ValueError, match="computes no tokens once that stand behind probes"):
        Recipe.of(SUM, fates_of(new, first), top_k=2)
    assert Recipe.of(SUM, fates_of(new, mask({6})), top_k=2).program == SUM
    assert Recipe.of(Boundary(), fates_of(new, first), top_k=2).program == Boundary()


def test_a_recipe_is_the_simplest_one_that_computes_the_same() -> None:
    fates = fates_of(mask(NEW), mask({6, 9}), spared=mask({7}))
    some = Recipe.of(ABOVE, fates, top_k=99)
    assert (some.program, some.top_k) == (ABOVE, 5), "no more are chosen than may be"
    assert some.fates is fates
    none = Recipe.of(Deviation(2), fates)
    assert none.program == Fixed(2)
    assert not none.candidates.any(), "nobody chooses"
    every = Recipe.of(SUM, fates, top_k=5)
    assert (every.program, every.top_k) == (Fixed(), 0)
    assert positions(every.always) == [0, 1, 2, 3, 4, 5, 6, 8, 9], "all but the one that is spared"


def test_fates_say_what_becomes_of_each_token() -> None:
    fates = fates_of(mask({0, 3}), mask({3}), spared=mask({0, 2}))
    assert fates[:5].tolist() == [
        Fate.ALWAYS,
        Fate.CANDIDATE,
        Fate.MOVED,
        Fate.PROBE,
        Fate.CANDIDATE,
    ]
    assert fates.dtype == np.int8


def test_a_check_stays_with_the_program_and_does_not_tell_programs_apart() -> None:
    one = checked(plan(Boundary(), top_k=1), SIMILAR)
    assert one.recipe.program == Boundary()
    assert one.recipe.program.reports
    assert not Boundary().reports
    assert one.recipe.also(mask(set(range(10)))).program.check is SIMILAR
    assert one.in_full().check is None


def test_a_token_enters_at_its_cut() -> None:
    recipe = Recipe.without_choice(mask(NEW))
    enters = np.array([-1, -1, 3, 3, -1, 1, 2, 3, -1, -1], np.int32)
    found = staged(recipe, enters)
    assert found.program == Staged((1, 3)), "who is always computed does not enter"
    assert positions(found.entering) == [2, 3, 5, 7]
    assert found.counts(0).entering == (1, 3)
    assert positions(found.always) == positions(recipe.always)
    fixed = staged(recipe.fixing(mask({3, 5})), enters)
    assert (positions(fixed.entering), positions(fixed.fixed)) == ([2, 7], [3, 5])
    many = np.where(np.arange(200) > 0, np.arange(200), -1).astype(np.int32)
    with pytest.raises(ValueError, match="tokens enter at 199 layers, of at most 123"):
        staged(Recipe.without_choice(np.arange(200) < 1), many)


def test_its_tokens_add_up() -> None:
    some = plan(Boundary(), again={2, 3}, top_k=3)
    assert (some.num_tokens, some.num_reused, some.num_recomputed) == (10, 6, 2 + 3)
    assert some.recomputed(chosen=1) == 2 + 1
    assert some.reused.tolist() == (~mask(NEW)).tolist()


def test_the_next_token_is_written_but_not_supplied() -> None:
    assert (plan().num_written, plan(next_token=99).num_written) == (10, 11)
    assert plan(next_token=99).num_tokens == 10


@pytest.mark.parametrize("next_token", [None, 99])
def test_what_was_computed_says_how_many_were_chosen(next_token: int | None) -> None:
    some = plan(ABOVE, again={2}, top_k=3, next_token=next_token)
    assert some.num_chosen(5 + (next_token is not None) + 2) == 2


@pytest.mark.parametrize(
    ("program", "options", "work"),
    [
        # The four new tokens at each layer.
        (Fixed(), {}, 4 * LAYERS),
        (Stock(), {}, 4 * LAYERS),
        (Fixed(), {"again": {2}}, 5 * LAYERS),
        # All ten at the dense layers, new and chosen ones at the others.
        (Fixed(2), {}, 2 * 10 + 3 * 4),
        (Boundary(2), {"top_k": 3}, 2 * 10 + 3 * (4 + 3)),
        # At the first layer once more, where scores come from there.
        (Boundary(), {"top_k": 3}, 5 * (4 + 3) + 4),
        (Boundary(), {"top_k": 3, "next_token": 99}, 5 * (4 + 1 + 3) + 4 + 1),
        # The two probes and the next token, at all layers but the last.
        (SUM, {"top_k": 3, "next_token": 99}, 5 * (4 + 1 + 3) + 4 * (2 + 1)),
        (ABOVE, {"top_k": 3, "next_token": 99}, 5 * (4 + 1 + 3) + 4 * (2 + 1)),
        (Deviation(1), {"top_k": 3}, 10 + 4 * (4 + 3)),
    ],
)
def test_its_work_is_that_of_its_layers(
    program: Program, options: dict[str, Any], work: int
) -> None:
    assert plan(program, **options).layer_tokens(MODEL) == work


def test_the_work_depends_on_how_many_were_chosen() -> None:
    some = plan(ABOVE, top_k=3, next_token=99)
    assert some.layer_tokens(MODEL) - some.layer_tokens(MODEL, chosen=1) == 2 * LAYERS
    assert some.layer_tokens(MODEL, chosen=0) == 5 * (4 + 1) + 4 * (2 + 1)


def test_a_dense_layer_has_all_tokens_active() -> None:
    assert plan(Boundary(), again={2}, top_k=3).active_tokens == 5 + 3
    assert plan(Boundary(1), again={2}, top_k=3).active_tokens == 10


def test_the_next_token_is_probed_wherever_attention_decides() -> None:
    assert {type(program) for program in PROGRAMS if program.probes_next_token} == {
        Boundary,
        Probed,
    }


def test_only_a_threshold_leaves_the_number_to_the_workers() -> None:
    assert [program for program in PROGRAMS if program.may_choose_fewer] == [ABOVE]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_where_nothing_is_chosen_only_dense_layers_are_left_of_a_choice(program: Program) -> None:
    left = plan(program, top_k=0).recipe.program
    assert left == (Fixed(program.dense_layers) if program.chooses else program)
    assert not left.chooses


@pytest.mark.parametrize("program", [Fixed(), Stock()], ids=str)
def test_a_program_without_a_choice_chooses_nothing(program: Program) -> None:
    with pytest.raises(ValueError, match=r"does not choose tokens; top_k is 3"):
        plan(program, top_k=3)


def test_programs_are_equal_if_they_may_share_a_pass() -> None:
    assert len(set(PROGRAMS)) == len(PROGRAMS)
    assert Probed(Gather.MAX, 0.1) == ABOVE
    assert {Boundary(2): "shared"}[Boundary(2)] == "shared"


@pytest.mark.parametrize(
    ("program", "top_k", "all_of_them"),
    [(Boundary(), 6, True), (MAX, 6, True), (ABOVE, 6, False), (Boundary(), 5, False)],
)
def test_what_is_computed_whatever_is_chosen(
    program: Program, top_k: int, all_of_them: bool
) -> None:
    """A choice of all is settled, unless fewer may be chosen."""
    expected = mask(set(range(10)) if all_of_them else NEW)
    assert plan(program, top_k=top_k).recipe.settled.tolist() == expected.tolist()


def test_in_full_it_computes_everything_at_every_layer_and_probes_nothing() -> None:
    some = plan(ABOVE, top_k=3, next_token=99).in_full()
    assert some.recipe.always.all()
    assert (some.recipe.top_k, some.recipe.program) == (0, Fixed())
    assert (some.num_recomputed, some.layer_tokens(MODEL, 0)) == (6, LAYERS * (10 + 1))
    assert some.next_token == 99, "its slot has to be written in any case"


WINDOWED = ModelLayers(LAYERS, scored=(1, 3))
"""Layers 0, 2 and 4 attend to a window."""


@pytest.mark.parametrize(
    ("program", "again"),
    [
        (Boundary(), 2),  # layers 0 and 1, of which the second gives the scores
        (Boundary(1), 1),
        (Boundary(2), 0),
        (Boundary(3), 1),
        (Boundary(4), 0),
        (Boundary(5), 0),
        (SUM, 4),
        (Probed(Gather.SUM_AND_LAST, first_layer=2), 4),
        (Probed(Gather.SUM_AND_LAST, first_layer=4), 4),
        (Fixed(2), 0),
        (Deviation(1), 0),
    ],
    ids=str,
)
def test_scores_are_taken_where_layers_see_the_whole_prompt(program: Program, again: int) -> None:
    """How many layers some tokens pass twice, until there are scores."""
    counts = Counts(tokens=100, always=10, chosen=7, probes=10)
    dense = program.dense_layers
    once = dense * 100 + (LAYERS - dense) * 17
    assert program.cost(counts, WINDOWED) == once + again * 10


@pytest.mark.parametrize(
    ("first", "found"), [(0, (1, 3)), (1, (1, 3)), (2, (3,)), (3, (3,)), (4, (3,)), (9, (3,))]
)
def test_where_no_scored_layer_is_left_the_last_one_counts(
    first: int, found: tuple[int, ...]
) -> None:
    assert WINDOWED.scored_from(first) == found


SIMILAR = Check(np.array([2, 7], np.int32), np.array([6, 9], np.int32), 3, max_drift=0.5)
"""Both runs of reused tokens; the halo of the second is all of it."""


def checked(plan: ReusePlan, check: Check) -> ReusePlan:
    program = replace(plan.recipe.program, check=check)
    return replace(plan, recipe=replace(plan.recipe, program=program))


def with_test() -> ReusePlan:
    return checked(plan(again={2, 3, 4, 7, 8}), SIMILAR)


def positions(of: BoolArray) -> list[int]:
    return np.flatnonzero(of).tolist()


def test_a_halo_is_the_first_tokens_of_a_segment_and_never_more() -> None:
    assert SIMILAR.halo_stop.tolist() == [5, 9]
    assert positions(SIMILAR.halos(10)) == [2, 3, 4, 7, 8]


def test_segments_above_the_bound_are_rejected_and_what_is_no_number() -> None:
    drifts = [(0.5, 0.6), (0.6, 0.5), (math.nan, math.inf), (0.0, 0.5)]
    found = [SIMILAR.is_rejected(each).tolist() for each in drifts]
    assert found == [[False, True], [True, False], [True, True], [False, False]]
    assert positions(SIMILAR.rejected((0.6, 0.1), 10)) == [2, 3, 4, 5]
    assert positions(SIMILAR.rejected((0.1, 0.6), 10)) == [7, 8]


def test_halos_are_moved_only_where_they_are_compared() -> None:
    assert positions(with_test().moved) == [2, 3, 4, 5, 7, 8]
    assert positions(plan(again={2, 3, 4, 7, 8}).moved) == [5]
    assert with_test().recomputed_positions is None, "the workers decide"
    assert with_test().num_tested == 2


def test_a_second_round_computes_the_rest_and_what_was_computed_behind_it() -> None:
    one = with_test()
    computed = one.recipe.always
    second = second_round(one, (0.6, 0.1), computed)
    assert second is not None
    assert positions(second.recipe.always) == [5, 6, 7, 8, 9]
    assert (second.recipe.program, second.check) == (Fixed(), None)
    assert second.num_written == one.num_written
    assert second_round(one, (0.1, 0.6), computed) is None, "all of it is its halo"
    assert second_round(one, (0.1, 0.1), computed) is None
    few = mask({0, 1, 2, 3, 4, 7, 8})
    left = second_round(one, (0.6, 0.1), few)
    assert left is not None
    assert positions(left.recipe.always) == [5, 7, 8], "and no more than that"


def test_what_was_added_counts_as_recomputed() -> None:
    one = checked(plan(MAX, again={2, 3}, top_k=1), SIMILAR)
    always = one.recipe.counts(0).always
    of_test = AcceptanceOutcome((0.1, 0.6), added=3, again=9)
    assert one.recomputed_after(PlanOutcome(always + 1, acceptance=of_test)) == 2 + 1 + 3
    assert one.recomputed_after(PlanOutcome(always + 1)) == 2 + 1


@pytest.mark.parametrize("program", [*PROGRAMS, SUM], ids=str)
def test_more_tokens_may_be_computed_than_a_policy_asks_for(program: Program) -> None:
    chooses = 2 if program.chooses else 0
    recipe = Recipe.of(program, fates_of(mask(NEW), mask({6, 9})), chooses)
    more = recipe.also(mask({3, 7, 8}))
    assert positions(more.always) == [0, 1, 3, 6, 7, 8, 9]
    assert more.top_k == chooses
    again = [6, 7, 8, 9] if program.computes_before_choice else [6, 9]
    assert positions(more.probes) == again, "who is computed once stands before the probes"
    every = Recipe.of(ABOVE, fates_of(mask(NEW), mask({6, 9})), top_k=6)
    assert every.also(mask({3, 7, 8})).top_k == 3, "no more than are left"
