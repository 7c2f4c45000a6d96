# SPDX-License-Identifier: Apache-2.0
"""Stages that choose by each other's layers leave the KV that one worker leaves, and report the
same."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from segreuse_extras.pipeline import backlog as module
from segreuse_extras.pipeline.proof import Rehearsal
from tests.prefill.loop import TinyDecoder, carry_out
from tests.prefill.staged import StagedWorld
from tests.prefill.test_executor import DONOR, plan
from tests.prefill.tiny import HIDDEN, SIZE, World
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.plan import Boundary, Fixed, Gather, PlanOutcome, Probed, ReusePlan
from vllm_segreuse.prefill import backlog
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import finish

LATE: dict[str, Any] = {
    "program": Probed(Gather.SUM_AND_LAST, first_layer=2, levelling=0.75, carries=True),
    "top_k": 5,
}
RECIPES: dict[str, dict[str, Any]] = {
    "focus": LATE,
    "not carried": {"program": Probed(Gather.SUM_AND_LAST, first_layer=1), "top_k": 5},
    "prophet": {"program": Probed(Gather.SUM), "top_k": 5},
    "carried, all layers scored": {"program": Probed(Gather.SUM, carries=True), "top_k": 5},
    "new text that does not ask": {**LATE, "probes": [18, 19]},
    "peaks": {"program": Probed(Gather.MAX, 0.3), "top_k": 5},
    "nothing is that high": {"program": Probed(Gather.MAX, 1.5), "top_k": 5},
    "everything": {**LATE, "top_k": 16},
    "fixed": {"program": Fixed()},
    "boundary": {"program": Boundary(), "top_k": 5},
}
SUFFIX = (7, 8, 9)
CUTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2,), ()),
    ((1,), SUFFIX),
    ((3,), SUFFIX),  # the last stage has the last layer alone, which is never asked
    ((1, 2, 3), ()),
]
"""Where stages end, and the suffix of the plans."""


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(module, "fatal", lambda *_: nullcontext())


def spread(one: ReusePlan, **changes: Any) -> ReusePlan:
    """As stages are given plans; and which tokens are computed is reported."""
    changes = {"explains": True, "reports": True} | changes
    return dataclasses.replace(one, spread=True, **changes)


def both(recipe: dict[str, Any], suffix: tuple[int, ...] = ()) -> list[ReusePlan]:
    """Two plans from different donors, one behind the other."""
    one, other = (
        dataclasses.replace(
            plan(name, first, donor, suffix=suffix, **recipe),
            block_ids=np.arange(first, first + 7, dtype=np.int32),
        )
        for name, first, donor in (("one", 10, DONOR), ("other", 30, DONOR + 4))
    )
    return [spread(one), spread(other)]


def outcomes(staged: StagedWorld, *plans: ReusePlan) -> dict[str, PlanOutcome]:
    """What the stages report of plans that arrive together."""
    staged.step(*plans)
    found: dict[str, PlanOutcome] = {}
    for _ in range(200):
        for each in staged.reports[0].values():
            found |= each.outcomes
        if all(each.is_empty for each in staged.backlogs):
            return found
        staged.step()
    raise AssertionError("plans starve")


def assert_as_one(staged: StagedWorld, world: World, plans: list[ReusePlan]) -> None:
    """Blocks of the plans are equal at every layer, but for the suffix, which vLLM computes."""
    for layer, (mine, expected) in enumerate(zip(staged.caches(), world.caches, strict=True)):
        for each in plans:
            for at in range(each.stop):
                block, offset = each.block_ids[at // SIZE], at % SIZE
                torch.testing.assert_close(
                    mine[block, :, :, offset],
                    expected[block, :, :, offset],
                    atol=2e-5,
                    rtol=0,
                    msg=lambda text, layer=layer, at=at: f"layer {layer}, token {at}: {text}",
                )


def assert_same_outcomes(found: dict[str, PlanOutcome], expected: dict[str, PlanOutcome]) -> None:
    assert found.keys() == expected.keys()
    for name, outcome in found.items():
        reference = expected[name]
        assert outcome._replace(drift=None) == reference._replace(drift=None)
        assert (outcome.drift is None) is (reference.drift is None)
        if outcome.drift is not None:
            assert outcome.drift == pytest.approx(reference.drift, rel=1e-5)


@pytest.mark.parametrize(("bounds", "suffix"), CUTS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_leave_and_report_what_one_worker_does(
    recipe: str, bounds: tuple[int, ...], suffix: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe == "fixed":
        suffix = ()  # it asks nobody
    world = World(monkeypatch)
    plans = both(RECIPES[recipe], suffix)
    expected = world.prefill.run(plans)
    staged = StagedWorld(monkeypatch, bounds)
    found = outcomes(staged, *both(RECIPES[recipe], suffix))
    assert_same_outcomes(found, expected.outcomes)
    assert_as_one(staged, world, plans)


@pytest.mark.parametrize("step_work", [1, 9, 40])
@pytest.mark.parametrize("recipe", ["focus", "prophet", "peaks"])
def test_so_they_do_by_small_shares(
    recipe: str, step_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end anywhere, and plans overtake each other between their goes."""
    world = World(monkeypatch)
    plans = both(RECIPES[recipe], SUFFIX)
    expected = world.prefill.run(plans)
    staged = StagedWorld(monkeypatch, (2,), step_work)
    found = outcomes(staged, *both(RECIPES[recipe], SUFFIX))
    assert_same_outcomes(found, expected.outcomes)
    assert_as_one(staged, world, plans)


@pytest.mark.parametrize("recipe", ["focus", "prophet"])
def test_windows_are_not_asked(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage has one layer that attends to everything, beside the last."""
    windows = (0, 3, 0, 0)
    world = World(monkeypatch, windows=windows)
    plans = both(RECIPES[recipe])
    expected = world.prefill.run(plans)
    staged = StagedWorld(monkeypatch, (2,), windows=windows)
    assert_same_outcomes(outcomes(staged, *both(RECIPES[recipe])), expected.outcomes)
    assert_as_one(staged, world, plans)


def test_stages_do_what_the_equations_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loop that one worker is compared with, too."""
    world = World(monkeypatch)
    one = spread(plan("one", 10, **LATE))
    world.prefill.prepare([one])  # the reused KV is where it belongs, nothing is computed
    active, kv = carry_out(TinyDecoder(world), one, world.kv(one))
    staged = StagedWorld(monkeypatch, (2,))
    assert outcomes(staged, one)["one"].positions == tuple(active)
    for number, cache in enumerate(staged.caches()):
        for at in range(one.start, one.stop):
            found = cache[one.block_ids[at // SIZE], :, :, at % SIZE].double().numpy()
            np.testing.assert_allclose(found, np.stack(kv[number, at]), atol=2e-5)


@pytest.mark.parametrize("bounds", [(2,), (1, 2)], ids=str)
def test_what_is_too_far_off_is_computed_in_full_by_all(
    bounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    far, near = both(LATE)
    plans = [dataclasses.replace(far, max_drift=1e-3), dataclasses.replace(near, max_drift=1e6)]
    expected = world.prefill.run(plans)
    staged = StagedWorld(monkeypatch, bounds)
    found = outcomes(staged, *plans)
    assert [found[it].in_full for it in ("one", "other")] == [True, False]
    assert_same_outcomes(found, expected.outcomes)
    assert_as_one(staged, world, plans)


@pytest.mark.parametrize("go", ["first", "second"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nan_in_either_go_on_any_stage_is_computed_in_full(
    stage: int, go: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = StagedWorld(monkeypatch, (1, 2))
    layer, calls = staged.runners[stage].stage.first, 0

    def spoil(index: int, _: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        nonlocal calls
        if index == layer:
            calls += 1
            if calls == (1 if go == "first" else 2):
                hidden[0] = torch.nan

    staged.worlds[stage].spoil = spoil
    one = spread(plan("one", 10, **LATE))
    found = outcomes(staged, one)["one"]
    assert found.computed == one.num_tokens
    world = World(monkeypatch)
    world.prefill.run([one.without_copies()])
    assert_as_one(staged, world, [one])


@pytest.mark.parametrize("stage", [0, 1])
def test_where_a_score_of_any_stage_is_no_number_nothing_is_chosen(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = StagedWorld(monkeypatch, (2,))
    runner = staged.runners[stage]
    scores = runner.attention_scores
    monkeypatch.setattr(runner, "attention_scores", lambda *given: scores(*given) * torch.nan)
    one = spread(plan("one", 10, **RECIPES["prophet"]))
    assert outcomes(staged, one)["one"].computed == one.num_tokens


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_stage_cannot_prepare_is_computed_in_full(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = StagedWorld(monkeypatch, (1, 2))
    prefill = staged.backlogs[stage].prefill
    whole, fails = prefill.prepare, [True]

    def prepare(*given: Any, **more: Any) -> Any:
        if fails.pop() if fails else False:
            raise ArithmeticError
        return whole(*given, **more)

    monkeypatch.setattr(prefill, "prepare", prepare)
    one, other = both(LATE)
    assert outcomes(staged, one, other)["one"].computed == one.num_tokens
    world = World(monkeypatch)
    world.prefill.run([one.without_copies(), other])
    assert_as_one(staged, world, [one, other])


@pytest.mark.parametrize("after", range(7))
def test_a_request_that_ends_between_goes_disturbs_nobody(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = StagedWorld(monkeypatch, (1, 2))
    plans = both(LATE)
    staged.step(*plans)
    done: set[str] = set()
    for _ in range(after):
        done |= staged.step()[1]
    dropped, found = staged.step(ends=("one",))
    assert dropped == {"one"} - done
    done |= found
    assert (done | set().union(*staged.until_idle())) - {"one"} == {"other"}
    world = World(monkeypatch)
    world.prefill.run([plans[1]])
    assert_as_one(staged, world, [plans[1]])


def test_where_one_stage_has_no_kernel_nothing_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any layer, as on one worker."""

    def without(layer: Any) -> Any:
        return dataclasses.replace(layer, kernels=dataclasses.replace(layer.kernels, carry=None))

    world, staged = World(monkeypatch), StagedWorld(monkeypatch, (1, 2))
    world.layers.known[0] = without(world.layers.known[0])
    staged.runners[0].known[0] = without(staged.runners[0].known[0])
    plans = both(LATE)
    world.prefill.run(plans)
    outcomes(staged, *plans)
    assert_as_one(staged, world, plans)
    carried = World(monkeypatch)
    carried.prefill.run(both(LATE))
    with pytest.raises(AssertionError, match="not close"):
        assert_as_one(staged, carried, plans)


@pytest.mark.parametrize("recipe", ["focus", "peaks", "fixed", "boundary"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_rehearses_all_goes_of_a_plan_by_itself(
    stage: int, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is always computed, and as many tokens as may be chosen, at all of its layers."""
    staged = StagedWorld(monkeypatch, (2,))
    runner, world = staged.runners[stage], staged.worlds[stage]
    one = plan("one", 10, **RECIPES[recipe])
    made = torch.Generator().manual_seed(0)
    hidden, residual = torch.randn(2, one.stop, HIDDEN, generator=made)
    scratch: Any = SimpleNamespace(entering=LayerState(hidden, residual))
    _, state = finish(Rehearsal(scratch)(runner, Batch([one], SIZE, torch.device("cpu"))))
    assert state is not None
    assert state.hidden_states.isfinite().all()
    always = {int(one.block_ids[at // SIZE]) * SIZE + at % SIZE for at in (4, 13, 22, 23)}
    for layer in range(runner.stage.first, runner.stage.stop):
        written = {slot for number, slots in world.written if number == layer for slot in slots}
        assert always <= written
        chosen = len(written - always)
        assert chosen <= 5 if recipe == "peaks" else chosen == one.recipe.top_k


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    world, staged = World(monkeypatch), StagedWorld(monkeypatch, (2,))
    plans = both(RECIPES["prophet"])
    world.prefill.run(plans)
    outcomes(staged, *both(RECIPES["focus"]))
    with pytest.raises(AssertionError, match="not close"):
        assert_as_one(staged, world, plans)
