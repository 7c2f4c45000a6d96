# SPDX-License-Identifier: Apache-2.0
"""Boundary drift is what its definition says; a segment above the bound is computed in the same
pass, and what stood behind it, and nothing else."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.prefill.loop import KV, TinyDecoder, carry_out
from tests.prefill.test_executor import DONOR, RECIPES, assert_equal, in_turns, pages
from tests.prefill.tiny import KV_HEADS, LAYERS, SIZE, World, checked, make_plan
from vllm_segreuse.plan import Check, Fixed, Pieces, ReusePlan
from vllm_segreuse.prefill import acceptance as module
from vllm_segreuse.prefill import drift, selection
from vllm_segreuse.prefill.executor import PassReport

START, COUNT, HALO = 4, 26, 3
NEW = [0, 8, 16, 24, 25]
"""Counted from the start, as what follows: an equal segment is 1 to 7; 9 to 15 and 17 to 23 are
similar ones."""
SIMILAR = ((9, 16), (17, 24))
TESTED = [name for name in RECIPES if name != "stock"]


def plan(
    name: str = "one",
    recipe: str = "fixed",
    bound: float = 0.0,
    first: int = 10,
    donor: int = DONOR,
) -> ReusePlan:
    """26 tokens behind a prefix hit of 4: an equal segment and two similar ones with halos."""
    pieces = Pieces.from_table([(5, 7, donor, 0, 0)])
    similar = [
        (13, 3, donor + 2, 1, 61),
        (16, 4, donor + 3, 0, 64),
        (21, 4, donor + 5, 0, 80),
        (25, 3, donor + 6, 0, 84),
    ]
    pieces = pieces.merged(Pieces.from_table(similar, is_similar=True))
    halos = [at + i for at, _ in SIMILAR for i in range(HALO)]
    probes = [24, 25]
    suffix = [7, 2] if RECIPES[recipe].get("program", Fixed()).probes_suffix else []
    made = make_plan(
        name,
        START,
        sorted([*NEW, *halos]),
        COUNT,
        np.arange(first, first + 9),
        suffix,
        probes=probes,
        **RECIPES[recipe],
    )
    starts, stops = (np.array(column, np.int32) for column in zip(*SIMILAR, strict=True))
    assert np.array_equal(pieces.similar_segments(START), (starts, stops))
    made = checked(made, Check(starts, stops, HALO, bound))
    return replace(made, pieces=pieces, reports=True)


def moved(world: World, plan: ReusePlan) -> KV:
    """What the plan's positions hold, with the donors' KV in place."""
    kv = world.kv(plan)
    for to, length, block, offset, _ in plan.pieces.rows():
        for i in range(length):
            at = block + (offset + i) // SIZE, (offset + i) % SIZE
            for layer, cache in enumerate(world.caches):
                kv[layer, to + i] = tuple(cache[at[0], :, :, at[1]].double().numpy())
    return kv


def drifts_of(plan: ReusePlan, before: KV, after: KV) -> list[float]:
    """By the definition: over keys and values, layers behind the dense ones, heads, halo tokens."""
    found = []
    for first, _ in SIMILAR:
        apart = [
            np.linalg.norm(new[head] - old[head]) / np.linalg.norm(new[head])
            for at in range(START + first, START + first + HALO)
            for layer in range(plan.recipe.program.dense_layers, LAYERS)
            for old, new in zip(before[layer, at], after[layer, at], strict=True)
            for head in range(KV_HEADS)
        ]
        found.append(float(np.mean(apart)))
    return found


class Expected(NamedTuple):
    drifts: list[float]
    active: list[int]
    kv: KV


def first_round(world: World, plan: ReusePlan) -> Expected:
    """What the loop makes of the plan, without a test."""
    before = moved(world, plan)
    active, after = carry_out(TinyDecoder(world), plan, dict(before))
    return Expected(drifts_of(plan, before, after), active, after)


def second_round(world: World, plan: ReusePlan, first: Expected, rejected: Sequence[int]) -> KV:
    """The rest of rejected segments, and what was computed behind the first token of it."""
    decoder, kv = TinyDecoder(world), dict(first.kv)
    left = {START + at for i in rejected for at in range(*SIMILAR[i])} - set(first.active)
    again = left | {at for at in first.active if at > min(left)}
    ids = dict(enumerate(plan.token_ids.tolist(), plan.start))
    decoder.run(range(LAYERS), {at: decoder.embed(ids[at], at) for at in sorted(again)}, kv)
    return kv


def check_kv(world: World, plan: ReusePlan, expected: KV) -> None:
    found = world.kv(plan)
    for where, pair in expected.items():
        np.testing.assert_allclose(found[where], pair, atol=3e-4)


def run(world: World, *plans: ReusePlan) -> PassReport:
    report = world.prefill.run(list(plans))
    assert report.not_finite == []
    return report


@pytest.mark.parametrize("recipe", TESTED)
def test_boundary_drift_is_how_far_halos_are_from_what_was_moved(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And measuring changes nothing of the pass."""
    world, untested = World(monkeypatch), World(monkeypatch)
    one = plan(recipe=recipe, bound=1e9)
    expected = first_round(world, one)
    outcome = run(world, one).outcomes["one"]
    assert outcome.acceptance is not None
    assert outcome.acceptance.drifts == pytest.approx(expected.drifts, rel=1e-3)
    assert min(expected.drifts) > 0.1
    assert abs(expected.drifts[0] - expected.drifts[1]) > 0.01, "or they could be exchanged"
    assert (outcome.acceptance.added, outcome.acceptance.again) == (0, 0)
    same = run(untested, checked(one, None)).outcomes["one"]
    assert same == outcome._replace(acceptance=None)
    assert_equal(pages(world, one), pages(untested, one))
    check_kv(world, one, expected.kv)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", TESTED)
@pytest.mark.parametrize("rejected", [(0,), (1,), (0, 1)], ids=str)
def test_rejected_segments_are_computed_and_what_stood_behind_them(
    rejected: tuple[int, ...], recipe: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    world.run_compiled(compiled)
    one = plan(recipe=recipe)
    expected = first_round(world, one)
    reject(monkeypatch, rejected)
    one.explains = True
    outcome = run(world, one).outcomes["one"]
    check_kv(world, one, second_round(world, one, expected, rejected))
    within = {START + at for i in rejected for at in range(*SIMILAR[i])}
    left = within - set(expected.active)
    behind = {at for at in expected.active if at > min(left)}
    assert outcome.computed == len(expected.active), "of the first round"
    assert outcome.acceptance is not None
    assert outcome.acceptance.added == len(left) > 0
    assert outcome.acceptance.again == len(left | behind)
    assert outcome.positions == tuple(sorted(within | set(expected.active) - {one.stop}))
    others = len(one.token_ids) - len(one.recipe.always)
    assert one.recomputed_after(outcome) >= len(left) + others


def reject(patch: pytest.MonkeyPatch, segments: Sequence[int]) -> None:
    """Whatever their drift."""

    def is_rejected(_: Check, drifts: Sequence[float]) -> np.ndarray[Any, Any]:
        return np.isin(np.arange(len(drifts)), segments)

    patch.setattr(Check, "is_rejected", is_rejected)


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_a_segment_is_rejected_above_its_bound(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is further off; beside a plan without a bound, of which nothing is rejected."""
    world, one = World(monkeypatch), plan()
    drifts = first_round(world, one).drifts
    worst = int(np.argmax(drifts))
    bound = drifts[worst] * factor
    other = plan("other", bound=1e9, first=30, donor=DONOR)
    both = run(world, plan(bound=bound), other).outcomes
    tested = both["one"].acceptance
    assert tested is not None
    assert (tested.added > 0) == (factor < 1)
    assert plan(bound=bound).check.is_rejected(tested.drifts).sum() == (factor < 1)  # type: ignore[union-attr]
    assert tested.drifts[worst] == pytest.approx(drifts[worst], rel=1e-4)
    assert both["other"].acceptance is not None
    assert both["other"].acceptance.again == 0


@pytest.mark.parametrize("recipe", TESTED)
def test_with_all_segments_rejected_and_nothing_equal_it_is_full_prefill(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first round left is overwritten."""
    world, full = World(monkeypatch), World(monkeypatch)
    one = plan(recipe=recipe)
    similar_only = one.pieces.is_similar
    pieces = one.pieces.where(similar_only)
    more = one.recipe.also(np.arange(one.num_tokens) < 9)
    one = replace(one, pieces=pieces, recipe=more)
    run(world, one)
    run(full, one.in_full())
    check_kv(world, one, full.kv(one))


@pytest.mark.parametrize("work", [1, 12, 60])
def test_in_several_steps_it_does_the_same(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, spread = World(monkeypatch), World(monkeypatch)
    report = run(at_once, plan(recipe="sum"))
    prepared = spread.prefill.prepare([plan(recipe="sum")], work)
    for cache in spread.caches:
        cache[DONOR:] = math.nan  # other requests have the donors' blocks by then
    chunks = spread.prefill.compute(prepared)
    [outcome] = in_turns(chunks)[0].outcomes.values()
    expected = report.outcomes["one"]
    assert outcome.acceptance is not None
    assert expected.acceptance is not None
    assert outcome.acceptance.drifts == pytest.approx(expected.acceptance.drifts, rel=1e-4)
    assert outcome._replace(acceptance=expected.acceptance, drift=expected.drift) == expected
    assert outcome.acceptance[1:] == expected.acceptance[1:]
    check = plan(recipe="sum")
    assert_equal(pages(at_once, check), pages(spread, check), atol=1e-5)


def test_a_halo_that_is_no_number_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed anyway, so nothing else of the pass would notice."""
    for spoilt in (math.nan, math.inf):
        world = World(monkeypatch)
        one = plan(bound=1e9)
        world.caches[2][DONOR + 2, 1, :, 2] = spoilt  # the second halo token of the first
        clean = World(monkeypatch)
        outcome = run(world, one).outcomes["one"]
        assert outcome.acceptance is not None
        assert one.check is not None
        assert one.check.is_rejected(outcome.acceptance.drifts).tolist() == [True, False]
        assert outcome.acceptance.added == 4
        reject(monkeypatch, [0])
        run(clean, one)
        assert_equal(pages(world, one), pages(clean, one))
        monkeypatch.undo()


def test_windows_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, windows=(0, 3, 0, 5), max_chunk_tokens=3)
    one = plan(recipe="sum")
    expected = first_round(world, one)
    run(world, one)
    check_kv(world, one, second_round(world, one, expected, (0, 1)))


@pytest.mark.parametrize("drift", [True, False], ids=["drift", "NaN"])
def test_a_plan_in_full_is_not_tested(drift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    one = plan(recipe="late" if drift else "fixed")
    one.max_drift = 0.0
    if not drift:
        world.caches[0][DONOR, 0, :, 2] = math.nan
    report = world.prefill.run([one])
    outcome = report.outcomes["one"]
    assert (outcome.in_full, outcome.acceptance) == (drift, None)
    assert (report.not_finite == []) is drift
    assert one.in_full().check is None


def test_ranks_agree_on_what_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 says of the mean over ranks counts."""
    world, one = World(monkeypatch), plan()
    own = run(World(monkeypatch), plan(bound=1e9)).outcomes["one"].acceptance
    assert own is not None
    seen: list[torch.Tensor] = []

    def mean(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.clone())
        return torch.full_like(values, 0.3 * HALO)

    monkeypatch.setattr(drift, "mean_over_ranks", mean)
    bounded = checked(one, one.check._replace(max_drift=0.31))  # type: ignore[union-attr]
    tested = run(world, bounded).outcomes
    assert tested["one"].acceptance is not None
    assert tested["one"].acceptance.drifts == pytest.approx((0.3, 0.3))
    assert tested["one"].acceptance.added == 0
    [totals] = seen
    assert (totals / HALO).tolist() == pytest.approx(own.drifts)
    assert selection.mean_over_ranks(totals) is totals


@pytest.mark.parametrize(
    ("most", "expected"),
    [(256, [2, 1, 0]), (6, [2, 1, 0]), (5, [2, 0]), (3, [2, 0]), (2, [2]), (1, [2])],
)
def test_of_many_halo_tokens_some_are_compared_the_last_among_them(
    most: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPARED_TOKENS", most)
    tested = plan().check
    assert tested is not None
    found = module.compared_tokens(tested)
    assert [each.tolist() for each in found] == [
        [first + at for at in expected] for first, _ in SIMILAR
    ]
    short = tested._replace(stop=tested.first + np.int32(1))
    assert [each.tolist() for each in module.compared_tokens(short)] == [[9], [17]]


@pytest.mark.parametrize(("halo", "compared"), [(255, 255), (256, 256), (257, 129), (513, 171)])
def test_up_to_256_halo_tokens_are_all_compared(halo: int, compared: int) -> None:
    """Of more every second one, and so on; the last is always among them."""
    one = Check(np.array([5], np.int32), np.array([2000], np.int32), halo, 0.5)
    [found] = module.compared_tokens(one)
    assert len(found) == compared
    assert found[0] == 5 + halo - 1
    assert found.min() >= 5


def test_what_was_computed_in_this_very_context_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one = World(monkeypatch), plan("again", bound=1e-4, first=10)
    source = replace(plan("again", first=50).in_full(), request_id="source")
    for cache in world.caches:  # the prefix hit
        cache[10] = cache[50]
    world.prefill.run([source])
    table = [
        (at, 1, int(source.block_ids[at // SIZE]), at % SIZE, at)
        for at in range(one.start, one.stop)
        if one.reused[at - one.start]
    ]
    outcome = run(world, replace(one, pieces=Pieces.from_table(table))).outcomes["again"]
    assert outcome.acceptance is not None
    assert outcome.acceptance.drifts == pytest.approx((0, 0), abs=1e-5)
    assert outcome.acceptance.again == 0
