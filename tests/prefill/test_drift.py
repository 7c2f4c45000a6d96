# SPDX-License-Identifier: Apache-2.0
"""Drift is what its definition says, and a request that is too far off is computed in full."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_executor import DONOR, assert_equal, pages, pair, plan
from tests.prefill.tiny import LAYERS, SIZE, World
from vllm_segreuse.kernels import page_tokens
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.plan import Boundary, Fate, Gather, PlanOutcome, Probed, ReusePlan
from vllm_segreuse.prefill import drift as module
from vllm_segreuse.prefill.outcomes import Ended

LATE = {"program": Probed(Gather.SUM_AND_LAST, first_layer=2), "top_k": 5}


def values(world: World, plan: ReusePlan) -> np.ndarray[Any, Any]:
    """Of every reused token, `[tokens, layers, heads, channels]`."""
    found = [
        [
            cache[plan.block_ids[at // SIZE], 1, :, at % SIZE].double().numpy()
            for cache in world.caches
        ]
        for at in range(plan.start, plan.stop)
    ]
    return np.array(found)[plan.reused]


def donated(world: World, plan: ReusePlan) -> np.ndarray[Any, Any]:
    """What they are before any of them is recomputed."""
    found = []
    for _, length, block, offset, _ in plan.pieces.rows():
        for i in range(offset, offset + length):
            at = block + i // SIZE, i % SIZE
            found.append([cache[at[0], 1, :, at[1]].double().numpy() for cache in world.caches])
    return np.array(found)


@pytest.mark.parametrize("gather", [Gather.SUM, Gather.SUM_AND_LAST])
def test_drift_is_how_far_values_moved_for_each_recomputed_token_of_a_segment(
    gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    plans = pair({"program": Probed(gather), "top_k": 5})
    before = [donated(world, each) for each in plans]
    report = world.prefill.run(plans)
    for each, moved in zip(plans, before, strict=True):
        new = values(world, each)
        differ = np.abs(new - moved).max((1, 2, 3)) > 1e-9
        assert 1 <= differ.sum() <= 5, "those that were chosen"
        apart = []
        for one, other in zip(new[differ], moved[differ], strict=True):
            for layer in range(LAYERS // 2, LAYERS):  # the second half; four of larger models
                for head in range(one.shape[1]):
                    difference = np.linalg.norm(one[layer, head] - other[layer, head])
                    apart.append(difference / np.linalg.norm(one[layer, head]))
        outcome = report.outcomes[each.request_id]
        assert outcome.drift == pytest.approx(100 * np.mean(apart) / (5 / 2), rel=1e-4)
        assert not outcome.in_full


def test_what_was_computed_in_this_very_context_does_not_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    source = plan("source", 40, **LATE).in_full()
    world.prefill.run([source])
    again = plan("again", 50, **LATE)
    pieces = [
        (at, 1, int(source.block_ids[at // SIZE]), at % SIZE, at)
        for at in range(again.start, again.stop)
        if again.reused[at - again.start]
    ]
    again.pieces = type(again.pieces).from_table(pieces)
    again.token_ids = source.token_ids
    for cache in world.caches:  # the prefix hit
        cache[again.block_ids[0]] = cache[source.block_ids[0]]
    outcome = world.prefill.run([again]).outcomes["again"]
    assert outcome.drift == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 2.0])
def test_37_above_its_bound_a_plan_is_computed_in_full_and_no_other_is(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, (one, other) = World(monkeypatch), pair(LATE)
    one.explains = True
    drifts = first.prefill.run([one, other]).outcomes
    assert drifts["one"].drift is not None
    one.max_drift = factor * drifts["one"].drift
    full, world = World(monkeypatch), World(monkeypatch)
    full.prefill.run([one.in_full()])
    report = world.prefill.run([one, other])
    assert report.not_finite == []
    everything = tuple(range(one.start, one.stop)) if factor < 1 else drifts["one"].positions
    expected = drifts["one"]._replace(in_full=factor < 1, positions=everything)
    assert report.outcomes["one"] == expected
    assert report.outcomes["other"] == drifts["other"]
    assert_equal(pages(world, other), pages(first, other))
    if factor < 1:
        assert_equal(pages(world, one), pages(full, one), atol=1e-4)
    else:
        assert_equal(pages(world, one), pages(first, one))


@pytest.mark.parametrize(
    "recipe",
    [{}, {"program": Boundary(1), "top_k": 5}, {"program": Probed(Gather.MAX, 0.3), "top_k": 5}],
    ids=str,
)
def test_where_drift_is_not_measured_no_bound_is_exceeded(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, one = World(monkeypatch), plan("one", 10, **recipe)
    one.max_drift = 0.0
    outcomes = world.prefill.run([one]).outcomes
    assert [(outcome.drift, outcome.in_full) for outcome in outcomes.values()] in (
        [],
        [(None, False)],
    )


@pytest.mark.parametrize(
    ("fine", "drift", "too_far"),
    [
        (True, 2.0, False),
        (True, 2.001, True),
        (True, 1.9, False),
        (True, math.nan, False),
        (False, 9.0, False),  # computed in full for another reason
    ],
)
def test_a_drift_of_just_its_bound_is_not_too_far(fine: bool, drift: float, too_far: bool) -> None:
    one = plan("one", 10, **LATE)
    one.max_drift = 2.0
    ended = Ended(one, fine, 5, drift, ())
    assert ended.is_too_far is too_far
    assert ended.outcome(None)[0].in_full is too_far
    assert ended.wants_positions is False
    assert Ended(replace(one, explains=True), fine, 5, drift, ()).wants_positions


def test_a_spoilt_plan_has_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    world, one = World(monkeypatch), plan("one", 10, **LATE)
    one.max_drift = 0.0
    world.caches[0][DONOR, 0, :, 2] = math.nan
    assert world.prefill.run([one]).outcomes == {"one": PlanOutcome(20)}


def test_of_many_tokens_a_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def pick(pages: torch.Tensor, strides: Any, slots: torch.Tensor) -> torch.Tensor:
        read.append(slots.numel())
        return page_tokens.pick_tokens(pages, strides, slots)

    monkeypatch.setattr(module, "pick_tokens", pick)
    monkeypatch.setattr(module, "COMPARED_TOKENS", 2)
    World(monkeypatch).prefill.run(pair(LATE))
    assert read == [4] * (2 * LAYERS // 2), "two of each plan, before and after, at two layers"


def test_layers_are_spread_over_the_second_half() -> None:
    assert module.spread_over(1) == [0]
    assert module.spread_over(4) == [2, 3]
    assert module.spread_over(24) == [12, 15, 18, 21]
    assert module.spread_over(7) == [3, 4, 5, 6]


def test_a_few_tokens_are_read_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    layout = world.layers.layouts[0]
    pages, slots = flat_pages(world.caches[0]), torch.tensor([7, 0, 7, 391, 22])
    for strides in (layout.keys, layout.values):
        expected = page_tokens.read_tokens(pages, strides, slots)
        assert torch.equal(page_tokens.pick_tokens(pages, strides, slots), expected)


def test_segments_of_which_no_token_may_be_chosen_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those whose context is the one that they were computed in, for instance."""
    one = plan("one", 10, **LATE)
    fates = one.recipe.fates.copy()
    first = fates[: one.pieces.segments(one.start).first[1]]
    first[first == Fate.CANDIDATE] = Fate.MOVED
    other = replace(one, recipe=replace(one.recipe, fates=fates))
    assert len(one.pieces.segments(one.start).first) == one.num_segments_to_choose_of == 2
    assert other.num_segments_to_choose_of == 1


def test_how_far_off_tokens_are_is_relative_to_each_heads_new_norm() -> None:
    """And where that is next to nothing, to a millionth."""
    moved = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 2e-6], [0.0, 0.0]]])
    new = torch.tensor([[[0.0, 5.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]])
    expected = [(math.sqrt(10) / 5 + 1 / 2) / 2, (2 + 0) / 2]
    found = module.relative_difference(moved, new)
    assert found.tolist() == pytest.approx(expected)
    assert (found.shape, found.dtype) == ((2,), torch.float32)


def test_differences_are_summed_by_group_and_averaged_over_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "mean_over_ranks", lambda values: values)
    new = [torch.ones(3, 1, 1), torch.full((3, 1, 1), 2.0)]
    moved = [torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1), torch.full((3, 1, 1), 3.0)]
    found = module.summed_differences(moved, iter(new), [2, 0, 1], torch.device("cpu"))
    # Relative differences of 0, 1 and 3 at one layer, of a half each at the other.
    assert found.tolist() == pytest.approx([(0.5 + 1.5) / 2, 0, 3.5 / 2])
    assert found.dtype == torch.float64
    nothing = module.summed_differences([], [], [0, 0], torch.device("cpu"))
    assert nothing.tolist() == [0, 0]
