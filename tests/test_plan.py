# SPDX-License-Identifier: Apache-2.0
"""What a plan says of itself, counted by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from segreuse_extras.audit.messages import AuditDone, AuditOrders, AuditResult
from vllm_segreuse.plan import (
    TO_THE_END,
    AcceptanceOutcome,
    BoolArray,
    Boundary,
    Check,
    Counts,
    Deviation,
    Fate,
    Fixed,
    Gather,
    Halo,
    ModelLayers,
    Pieces,
    PlanOutcome,
    Probed,
    Program,
    Recipe,
    Restoration,
    ReusePlan,
    Staged,
    Stock,
    TierDone,
    fates_of,
    for_similar,
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
    suffix: Sequence[int] = (),
) -> ReusePlan:
    """Ten tokens, six of them reused; the probes are the two at the end that are new."""
    recipe = Recipe.of(program, fates_of(mask(NEW | again), mask({6, 9})), top_k)
    found = Pieces.from_table([(START + 2, 4, 70, 0, 30), (START + 7, 2, 71, 0, 90)])
    tokens = np.arange(10, dtype=np.int32)
    behind = np.array(suffix, np.int32)
    return ReusePlan("r", START, START + 10, tokens, found, recipe, [70, 71], 0, suffix=behind)


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


def test_the_suffix_is_written_but_not_supplied() -> None:
    some = plan(suffix=[98, 99])
    assert (plan().num_written, some.num_written) == (10, 12)
    assert (plan().written_until, some.written_until) == (START + 10, START + 12)
    assert (some.num_tokens, some.num_supplied) == (10, 10)
    assert replace(some, spread=True).num_supplied == 10


@pytest.mark.parametrize("suffix", [[], [99]])
def test_what_was_computed_says_how_many_were_chosen(suffix: list[int]) -> None:
    """The suffix is vLLM's to compute."""
    assert plan(ABOVE, again={2}, top_k=3, suffix=suffix).num_chosen(5 + 2) == 2


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
        # The suffix at the layers that lead to the choice.
        (Boundary(), {"top_k": 3, "suffix": [9, 9]}, 5 * (4 + 3) + 4 + 2),
        (Boundary(2), {"top_k": 3, "suffix": [9, 9]}, 2 * (10 + 2) + 3 * (4 + 3)),
        # The two probes and the suffix, at all layers but the last.
        (SUM, {"top_k": 3, "suffix": [9, 9]}, 5 * (4 + 3) + 4 * (2 + 2)),
        (ABOVE, {"top_k": 3, "suffix": [9, 9]}, 5 * (4 + 3) + 4 * (2 + 2)),
        (Deviation(1), {"top_k": 3}, 10 + 4 * (4 + 3)),
    ],
)
def test_its_work_is_that_of_its_layers(
    program: Program, options: dict[str, Any], work: int
) -> None:
    assert plan(program, **options).layer_tokens(MODEL) == work


@pytest.mark.parametrize(
    ("program", "layers"),
    [
        (Fixed(), 0),
        (Fixed(2), 2),
        (Stock(), 0),
        (Boundary(), 1),
        (Boundary(2), 2),
        (Deviation(2), 3),
        # In two goes.
        (ABOVE, 0),
        (SUM, 0),
        (Probed(Gather.MAX, 0.1, first_layer=LAYERS - 2, carries=True), 0),
        # No layer from there on is scored.
        (Probed(Gather.SUM, first_layer=LAYERS - 1), LAYERS),
        (Staged((3,)), LAYERS),
    ],
)
def test_so_many_layers_run_before_known_tokens_only_have_to_pass_the_others(
    program: Program, layers: int
) -> None:
    assert program.layers_before_choice(MODEL) == layers


def test_where_the_boundary_attends_to_a_window_the_next_layer_that_does_not_is_waited_for() -> (
    None
):
    windows = ModelLayers(LAYERS, (2, 3))
    assert (
        Boundary().layers_before_choice(windows) == Boundary(2).layers_before_choice(windows) == 3
    )


def test_stages_are_joined_to_a_model() -> None:
    stages = [ModelLayers(2, (0, 1)), ModelLayers(1, ()), ModelLayers(3, (0, 1))]
    assert ModelLayers.joined(stages) == ModelLayers(6, (0, 1, 3, 4))
    for alone in (MODEL, ModelLayers(3, (1,), sharing=4)):
        assert ModelLayers.joined([alone]) == alone


def test_the_work_depends_on_how_many_were_chosen() -> None:
    some = plan(ABOVE, top_k=3, suffix=[99])
    assert some.layer_tokens(MODEL) - some.layer_tokens(MODEL, chosen=1) == 2 * LAYERS
    assert some.layer_tokens(MODEL, chosen=0) == 5 * 4 + 4 * (2 + 1)


def test_a_dense_layer_has_all_tokens_active() -> None:
    assert plan(Boundary(), again={2}, top_k=3).active_tokens == 5 + 3
    assert plan(Boundary(1), again={2}, top_k=3).active_tokens == 10
    assert plan(Boundary(1), again={2}, top_k=3, suffix=[99]).active_tokens == 10 + 1


def test_the_suffix_and_what_is_chosen_are_active_one_after_the_other() -> None:
    assert plan(SUM, top_k=3, suffix=[7, 8, 9, 9]).active_tokens == 4 + 4
    assert plan(SUM, top_k=3, suffix=[7, 8]).active_tokens == 4 + 3


def test_the_suffix_is_probed_wherever_attention_decides() -> None:
    assert {type(program) for program in PROGRAMS if program.probes_suffix} == {Boundary, Probed}


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
    some = plan(ABOVE, top_k=3, suffix=[99]).in_full()
    assert some.recipe.always.all()
    assert (some.recipe.top_k, some.recipe.program) == (0, Fixed())
    assert (some.num_recomputed, some.layer_tokens(MODEL, 0)) == (6, LAYERS * 10)
    assert not len(some.suffix), "vLLM computes it next"


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


NUMBER = 7


def restoring(is_restored: bool | None = None, **changes: Any) -> ReusePlan:
    """Two blocks of four tokens, from which the plan begins."""
    pieces = Pieces.from_table([(0, 4, 90, 0, 0), (4, 4, 91, 0, 4)])
    restoration = Restoration(NUMBER, pieces, np.arange(50, 58, dtype=np.int32))
    return replace(plan(), restoration=restoration, is_restored=is_restored, **changes)


def test_a_plan_begins_where_it_restores() -> None:
    assert (plan().begin, plan().num_restored, plan().num_supplied) == (START, 0, 10)
    assert plan().copied.rows() == plan().pieces.rows()
    one = restoring()
    assert (one.begin, one.num_restored, one.num_supplied) == (0, 8, 18)
    assert one.copied.rows() == [
        [0, 4, 90, 0, 0],
        [4, 4, 91, 0, 4],
        [10, 4, 70, 0, 30],
        [15, 2, 71, 0, 90],
    ]
    assert [one.restores(number) for number in (6, NUMBER, 8)] == [False, True, False]
    assert not plan().restores(0)


@pytest.mark.parametrize(
    ("is_restored", "exact", "known"),
    [(None, START, 0), (True, START, START), (False, 0, 0)],
)
def test_what_is_restored_is_exact_once_it_is_known_to_be_in_place(
    is_restored: bool | None, exact: int, known: int
) -> None:
    one = restoring(is_restored)
    assert (one.exact_until, one.known_exact_until) == (exact, known)
    other = replace(plan(), is_restored=is_restored)
    assert (other.exact_until, other.known_exact_until) == (START, START)


def test_a_plan_that_only_restores_leaves_nothing_behind_it_inexact() -> None:
    alone = restoring(True, stop=START)
    assert (alone.exact_until, alone.known_exact_until) == (TO_THE_END, TO_THE_END)
    assert restoring(None, stop=START).known_exact_until == 0


def test_what_is_restored_is_supplied_too() -> None:
    assert restoring(suffix=np.array([99], np.int32)).num_supplied == 18


def test_without_copies_all_is_computed_and_what_is_restored_too() -> None:
    whole = restoring(explains=True).without_copies()
    assert (whole.start, whole.stop, whole.begin, whole.num_restored) == (0, 18, 0, 0)
    assert whole.token_ids.tolist() == [*range(50, 58), *range(10)]
    assert whole.restores(NUMBER)
    assert whole.restoration is not None
    assert (len(whole.restoration.pieces), whole.restoration.num_tokens) == (0, 0)
    assert whole.recipe.always.tolist() == [True] * 18
    assert (whole.reports, plan().reports, plan().without_copies().reports) == (True, False, True)
    assert plan().without_copies().recipe.always.all()


def test_what_a_spoilt_pass_has_left_in_the_suffixes_slots_is_written_over() -> None:
    behind = np.array([98, 99], np.int32)
    assert plan(SUM, top_k=2, suffix=[98, 99]).without_copies().suffix.tolist() == [98, 99]
    assert restoring(suffix=behind).without_copies().suffix.tolist() == [98, 99]


def test_another_recipe_reads_the_suffix_if_its_program_does() -> None:
    """Also of a plan that has left it to vLLM unread."""
    tokens = np.arange(11, dtype=np.int32)
    for program, stop, suffix in (
        (SUM, 9, [9, 10]),
        (Boundary(), 9, [9, 10]),
        (Deviation(1), 10, []),
        (Fixed(), 9, []),
    ):
        choosing = 2 if program.chooses else 0
        recipe = Recipe.of(program, fates_of(mask(NEW), mask({6, 9})), choosing)
        for one in (plan(), plan().leaving_suffix()):
            found = one.computed_by(recipe, tokens)
            assert (found.stop, found.suffix.tolist()) == (START + stop, suffix)
            assert found.token_ids.tolist() == [*range(stop)]
            assert (found.token_at_stop, len(found.recipe.fates)) == (stop, stop)
            assert found.reports == program.reports


def test_the_share_of_the_work_is_that_of_full_prefill_behind_the_prefix_hit() -> None:
    """Of 20 tokens 12 are behind the hit; the last two are computed by vLLM."""
    assert plan().computed_share(MODEL, 20) == (4 + 2) / 12
    assert plan().computed_share(MODEL, 20, prefix=0) == (4 + 2) / 20
    assert restoring().computed_share(MODEL, 20) == (4 + 2) / 20
    assert plan().computed_share(MODEL, 18) == round(4 / 10, 4)
    in_full = PlanOutcome(4, in_full=True)
    assert plan().computed_share(MODEL, 20, in_full) == round((4 + 10 + 2) / 12, 4)
    tested = PlanOutcome(4, acceptance=AcceptanceOutcome((0.7,), added=2, again=3))
    assert plan().computed_share(MODEL, 20, tested) == (4 + 3 + 2) / 12
    chosen = plan(Deviation(1), top_k=3)
    assert chosen.computed_share(MODEL, 18) == (10 + 4 * 7) / 50
    assert chosen.computed_share(MODEL, 18, PlanOutcome(4 + 1)) == (10 + 4 * 5) / 50


def test_layers_that_share_kv_are_work_of_vllm_alone() -> None:
    """Half as many more as a pass runs."""
    sharing = replace(MODEL, sharing=LAYERS // 2)
    in_all = LAYERS + LAYERS // 2
    assert sharing.in_all == in_all
    assert plan().computed_share(sharing, 20) == round((4 * LAYERS + 2 * in_all) / (12 * in_all), 4)
    assert plan().layer_tokens(sharing) == 4 * LAYERS


def test_which_tokens_are_computed_again_is_known_unless_some_are_chosen() -> None:
    found = plan(again={2, 7}).recomputed_positions
    assert found is not None
    assert (found.tolist(), found.dtype) == ([START + 2, START + 7], np.int32)
    every = plan(Boundary(), top_k=6).recomputed_positions
    assert every is not None
    assert every.tolist() == [START + at for at in (2, 3, 4, 5, 7, 8)]
    assert plan(Boundary(), top_k=5).recomputed_positions is None


def test_segments_to_choose_of_have_a_token_that_may_be_chosen() -> None:
    assert plan(Boundary(), top_k=2).num_segments_to_choose_of == 2
    assert plan(Boundary(), again={7, 8}, top_k=2).num_segments_to_choose_of == 1
    assert plan().num_segments_to_choose_of == 0
    nothing = replace(plan(Boundary(), top_k=2), pieces=Pieces.from_table([]))
    assert nothing.num_segments_to_choose_of == 0


def test_reports_of_ranks_and_steps_are_put_together() -> None:
    one = TierDone(Counter({3: 1}), {3}, {(3, 0)}, set())
    other = TierDone(Counter({3: 1, 4: 2}), set(), {(4, 1)}, {4})
    both = TierDone(Counter({3: 2, 4: 2}), {3}, {(3, 0), (4, 1)}, {4})
    assert one.merged(other) == other.merged(one) == both
    assert [bool(it) for it in (TierDone(), one)] == [False, True]
    first, second = AuditResult(0.1, 3, 4), AuditResult(0.2, 4, 4)
    audits = AuditDone({"a": first}).merged(AuditDone({"b": second}))
    assert audits.results == {"a": first, "b": second}


@pytest.mark.parametrize("field", ["record", "compare", "forget"])
def test_orders_are_sent_if_there_are_any(field: str) -> None:
    orders = AuditOrders()
    assert not orders
    some: Any = ["a"] if field == "forget" else {"a": None}
    assert replace(orders, **{field: some})


FOUND = Pieces.from_table([(START + 2, 4, 70, 0, 30), (START + 7, 2, 71, 0, 90)], is_similar=True)


def with_halo(halo: Halo, program: Program = PROGRAMS[0], pieces: Pieces = FOUND) -> Recipe:
    recipe = Recipe.of(program, fates_of(mask(NEW), mask({6, 9})), int(program.chooses))
    return for_similar(recipe, halo, pieces, START, START + 10)


@pytest.mark.parametrize("program", [Fixed(), Boundary()], ids=str)
def test_the_halos_of_similar_segments_are_computed_and_compared_if_there_is_a_bound(
    program: Program,
) -> None:
    bounded = with_halo(Halo(2, 0.5), program)
    assert positions(bounded.always) == [0, 1, 2, 3, 6, 7, 8, 9]
    check = bounded.program.check
    assert check is not None
    assert (check.halo_tokens, check.max_drift) == (2, 0.5)
    assert (check.first.tolist(), check.stop.tolist()) == ([2, 7], [6, 9])
    free = with_halo(Halo(2, None), program)
    assert positions(free.always) == positions(bounded.always)
    assert free.program.check is None


def test_where_no_halo_is_asked_for_or_nothing_is_similar_nothing_changes() -> None:
    equal = Pieces.from_table(FOUND.rows())
    for changed in (with_halo(Halo(0, 0.5)), with_halo(Halo(3, 0.5), pieces=equal)):
        assert positions(changed.always) == sorted(NEW)
        assert changed.program.check is None


def test_of_segments_that_are_all_computed_nothing_is_left_to_be_rejected() -> None:
    """Also where the last of their tokens is chosen whatever its score."""
    whole = with_halo(Halo(4, 0.5))
    assert whole.always.all()
    assert whole.program.check is None
    assert with_halo(Halo(3, 0.5)).program.check is not None
    chosen = with_halo(Halo(3, 0.5), Boundary())
    assert (chosen.settled.all(), chosen.program.check) == (True, None)


def test_the_tail_is_left_to_vllm_where_nothing_depends_on_it() -> None:
    fates = fates_of(mask(NEW), mask({6, 9}))
    assert Recipe.of(Fixed(), fates).suffix_tokens(9) == 1
    assert Recipe.of(Fixed(), fates).suffix_tokens(10) == 0
    assert Recipe.of(Fixed(1), fates).suffix_tokens(9) == 0
    assert Recipe.of(Deviation(1), fates, 2).suffix_tokens(9) == 0
    assert with_test().recipe.suffix_tokens(9) == 0


def test_probes_at_the_end_are_left_to_vllm_once_they_were_read() -> None:
    """Those that are new: the last of what is reused is the plan's own."""
    new = mask({0, 6, 7, 8, 9})
    for probes, new_from, left in (
        ({6, 7, 8, 9}, 6, 4),
        ({8, 9}, 6, 2),  # other new text is computed first, once
        ({6, 7, 8, 9}, 8, 2),
        ({0, 6, 7, 8, 9}, 6, 4),
    ):
        recipe = Recipe.of(SUM, fates_of(new, mask(probes)), 2)
        assert recipe.suffix_tokens(new_from) == left
    dense = Recipe.of(Boundary(1), fates_of(new, mask({6, 7, 8, 9})), 2)
    assert dense.suffix_tokens(6) == 0, "they go on from the dense layers"
    behind = fates_of(new, mask({0, 6}))
    assert Recipe.of(Boundary(), behind, 2).suffix_tokens(6) == 0


def test_what_leaves_its_suffix_probes_and_chooses_the_same() -> None:
    one = replace(plan(SUM, top_k=3, suffix=[99]), token_at_stop=99)
    left = one.leaving_suffix()
    assert (left.stop, left.suffix.tolist(), left.token_at_stop) == (START + 9, [9, 99], 9)
    assert left.token_ids.tolist() == [*range(9)]
    assert left.recipe.fates.tolist() == one.recipe.fates[:9].tolist()
    assert (left.recipe.program, left.recipe.top_k) == (SUM, 3)
    assert left.written_until == one.written_until
    share = left.computed_share(MODEL, START + 11)
    assert share == one.computed_share(MODEL, START + 11), "vLLM computes what the pass does not"
    assert left.leaving_suffix() is left


def test_workers_report_what_only_they_know() -> None:
    assert [it for it in PROGRAMS if it.reports] == [SUM, MAX, ABOVE]
    assert [it for it in PROGRAMS if it.measures_drift] == [SUM, MAX]
    assert replace(Fixed(), check=SIMILAR).reports


def test_a_recipe_of_the_first_tokens() -> None:
    whole = Recipe.of(Boundary(), fates_of(mask(NEW), mask({6})), 3)
    first = whole.up_to(7)
    assert (first.program, first.top_k) == (Boundary(), 3)
    assert first.fates.tolist() == whole.fates[:7].tolist()


def test_only_layers_before_the_last_give_scores() -> None:
    assert ModelLayers.of_full_attention(5).scored == (0, 1, 2, 3)
    assert ModelLayers.of_full_attention(1).scored == ()
