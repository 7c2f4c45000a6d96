# SPDX-License-Identifier: Apache-2.0
"""Tokens that enter between layers: below their cut the donor's KV, above it what the new context
makes of the donor's state."""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.loop import TinyDecoder, carry_out_in_stages
from tests.prefill.test_passes import assert_holds
from tests.prefill.tiny import LAYERS, SIZE, World, checked, make_plan
from vllm_segreuse.plan import (
    Check,
    Fixed,
    ModelLayers,
    Pieces,
    Recipe,
    ReusePlan,
    Staged,
    second_round,
    staged,
)
from vllm_segreuse.prefill.chunks import finish
from vllm_segreuse.prefill.executor import PassReport

Patch = pytest.MonkeyPatch
CUTS = tuple(range(LAYERS))
DONOR, OWN = np.arange(3, 13), np.arange(40, 50)
"""Blocks, of four tokens each."""
COUNT = 36


def computed(world: World, name: str = "donor", blocks: np.ndarray = DONOR) -> ReusePlan:
    """A text that was computed in full."""
    plan = make_plan(name, 0, list(range(COUNT)), COUNT, blocks)
    world.prefill.run([plan])
    return plan


def entering(
    donor: ReusePlan, enters: np.ndarray, at: int = 0, always: list[int] | None = None
) -> ReusePlan:
    """A plan of the donor's tokens, each of which enters at its layer unless it is always computed.

    Args:
        enters: -1: moved at all layers.
        at: position of the donor's first token; there is new text before it.
    """
    tokens = np.arange(COUNT)
    pieces = np.stack([at + tokens, tokens**0, DONOR[tokens // SIZE], tokens % SIZE, tokens], 1)
    new = [*range(at), *(at + token for token in always or [])]
    plan = make_plan(
        "reusing",
        0,
        new,
        at + COUNT,
        np.arange(40, 40 + -(-(at + COUNT) // SIZE)),
        pieces=pieces.tolist(),
        enters=np.concatenate([np.full(at, -1), enters]),
    )
    plan.token_ids[at:] = donor.token_ids
    return plan


def at_cut(cut: int) -> np.ndarray:
    return np.full(COUNT, cut)


def held(world: World, plan: ReusePlan, layer: int) -> torch.Tensor:
    return world.caches[layer][plan.block_ids[: COUNT // SIZE].tolist()]


def test_everything_from_the_embeddings_is_full_recomputation(monkeypatch: Patch) -> None:
    """Bit for bit: to enter at the first layer is to be computed."""
    world = World(monkeypatch, cuts=CUTS)
    donor = computed(world)
    plan = entering(donor, at_cut(0))
    assert plan.recipe.program == Staged((0,))
    world.prefill.run([plan])
    for layer in range(LAYERS):
        assert torch.equal(held(world, plan, layer), held(world, donor, layer))


@pytest.mark.parametrize("cut", CUTS)
def test_states_of_the_same_context_give_the_full_result(cut: int, monkeypatch: Patch) -> None:
    """Bit for bit, whichever cut the tokens enter at; what is below is the donor's."""
    world = World(monkeypatch, cuts=CUTS)
    donor = computed(world)
    plan = entering(donor, at_cut(cut))
    world.written.clear()
    world.prefill.run([plan])
    for layer in range(LAYERS):
        assert torch.equal(held(world, plan, layer), held(world, donor, layer))
    assert {layer for layer, _ in world.written} == set(range(cut, LAYERS)), "none below is run"


@pytest.mark.parametrize("max_chunk_tokens", [1000, 7])
@pytest.mark.parametrize("scattered", [True, False], ids=["kernel", "rows"])
def test_a_pass_does_what_the_loop_does(
    scattered: bool, max_chunk_tokens: int, monkeypatch: Patch
) -> None:
    """Behind other text, at several cuts, beside tokens that are moved, and halos."""
    world = World(monkeypatch, scattered, max_chunk_tokens, cuts=(1, 2, 3))
    decoder = TinyDecoder(world)
    donor = computed(world)
    enters = np.repeat([1, -1, 3, 2, 3, 1], COUNT // 6)
    halo = [0, 1, 12, 13, 30]
    plan = entering(donor, enters, at=5, always=halo)
    streams = {p: decoder.embed(int(token), p) for p, token in enumerate(donor.token_ids)}
    by_cut: dict[int, dict[int, np.ndarray]] = {}
    kv: dict[Any, Any] = {}
    for layer in range(LAYERS):
        by_cut[layer] = streams
        streams = decoder.run(range(layer, layer + 1), streams, kv)
    moved = {(layer, 5 + p): kv[layer, p] for layer, p in itertools.product(CUTS, range(COUNT))}
    entered = {
        5 + p: (int(cut), by_cut[int(cut)][p])
        for p, cut in enumerate(enters)
        if cut > 0 and p not in halo
    }
    expected = carry_out_in_stages(decoder, plan, moved, entered)
    world.prefill.run([plan])
    assert_holds(world, plan, expected)
    for layer, p in itertools.product(CUTS, range(COUNT)):
        if p not in halo and (enters[p] < 0 or layer < enters[p]):
            found, of_donor = world.kv(plan)[layer, 5 + p], world.kv(donor)[layer, p]
            assert (found[0] == of_donor[0]).all(), "moved as it is"
            assert (found[1] == of_donor[1]).all()


def test_the_work_that_is_reported_is_done(monkeypatch: Patch) -> None:
    world = World(monkeypatch, cuts=(1, 3))
    donor = computed(world)
    enters = np.repeat([1, -1, 3], COUNT // 3)
    plan = entering(donor, enters, at=5, always=[0, 1, 30])
    world.written.clear()
    world.prefill.run([plan])
    promised = 8 * LAYERS + 10 * (LAYERS - 1) + 11 * (LAYERS - 3)
    assert (
        world.layer_tokens == promised == plan.layer_tokens(ModelLayers.of_full_attention(LAYERS))
    )
    assert plan.active_tokens == 8 + 10 + 11
    assert plan.num_entering == 21
    assert plan.num_reused == COUNT
    assert plan.num_recomputed == 3


def test_plans_side_by_side_enter_each_for_itself(monkeypatch: Patch) -> None:
    world = World(monkeypatch, cuts=(2,))
    donor = computed(world)
    first = entering(donor, at_cut(2))
    second = entering(donor, np.repeat([2, -1], COUNT // 2), at=3)
    second.block_ids = np.arange(60, 70, dtype=np.int32)
    together = dataclasses.replace(second, request_id="other")
    world.prefill.run([first, together])
    beside = [held(world, plan, 3).clone() for plan in (first, together)]
    for cache in world.caches:
        cache[40:70] = 0
    for plan, found in zip((first, second), beside, strict=True):
        world.prefill.run([plan])
        torch.testing.assert_close(held(world, plan, 3), found)


def repeated(report: PassReport) -> list[str]:
    return report.not_finite


def test_a_slot_whose_state_is_another_positions_is_computed_in_full(monkeypatch: Patch) -> None:
    """As if vLLM had written the block anew behind our back."""
    world = World(monkeypatch, cuts=(2,))
    donor = computed(world)
    fresh = computed(world, "other", np.arange(70, 80))
    expected = held(world, donor, 3).clone()
    states = world.layers.states
    assert states is not None
    states.positions[0, DONOR[1] * SIZE] = 77
    plan = entering(donor, at_cut(2))
    assert repeated(world.prefill.run([plan])) == ["reusing"]
    torch.testing.assert_close(held(world, plan, 3), expected)
    assert fresh is not donor


def test_what_was_moved_has_no_state(monkeypatch: Patch) -> None:
    """Its slots may have had one, of the text that was there before."""
    world = World(monkeypatch, cuts=(2,))
    donor = computed(world)
    computed(world, "before", OWN)
    moved = entering(donor, at_cut(-1))
    world.prefill.run([moved])
    again = entering(donor, at_cut(2))
    again.pieces = dataclasses.replace(again.pieces, block=OWN[np.arange(COUNT) // SIZE])
    again.block_ids = np.arange(60, 70, dtype=np.int32)
    assert repeated(world.prefill.run([again])) == ["reusing"]


def test_states_follow_whoever_writes_the_slot(monkeypatch: Patch) -> None:
    """A block that was evicted and computed anew donates what it holds now."""
    world = World(monkeypatch, cuts=(2,))
    computed(world)
    later = computed(world, "of another request")
    plan = entering(later, at_cut(2))
    world.prefill.run([plan])
    for layer in range(LAYERS):
        assert torch.equal(held(world, plan, layer), held(world, later, layer))


def test_padding_and_forwards_without_kv_leave_nothing(monkeypatch: Patch) -> None:
    """vLLM pads batches with slot -1, and warms up without any."""
    world = World(monkeypatch, cuts=(1,))
    states = world.layers.states
    assert states is not None
    layer = world.model.layers[1]
    rows = torch.ones(3, 32)
    monkeypatch.setattr(layer, "forward", lambda **_: None)
    slots: Any = None
    monkeypatch.setattr("vllm_segreuse.prefill.states.slots_of_forward", lambda name: slots)
    enter = functools.partial(layer, hidden_states=rows, residual=None)
    enter(positions=torch.tensor([4, 5, 6]))
    assert int((states.positions >= 0).sum()) == 0
    slots = torch.tensor([9, -1, -1])
    enter(positions=torch.tensor([4, 5, 6]))
    assert states.positions[0, :-1].nonzero().numel() > 0
    assert (states.positions[0, :-1] >= 0).nonzero().flatten().tolist() == [9]
    enter(positions=torch.tensor([[7, 8, 9], [1, 1, 1], [2, 2, 2]]))
    assert int(states.positions[0, 9]) == 7, "multimodal models have several rows"


def test_recipes_that_choose_have_no_stages() -> None:
    mask = np.array([True, False, False])
    enters = np.array([-1, 2, -1], np.int32)
    with pytest.raises(ValueError, match="no stages at which tokens enter"):
        staged(Recipe.without_choice(mask, Fixed(1)), enters)
    assert staged(Recipe.without_choice(mask), None).program == Fixed()
    recipe = staged(Recipe.without_choice(mask), np.array([2, -1, -1], np.int32))
    assert recipe.program == Fixed(), "what is always computed does not enter"


def test_pieces_say_where_their_tokens_enter() -> None:
    whole = Pieces.from_table([[2, 2, 0, 0, 0]])
    part = Pieces.from_table([[5, 3, 1, 0, 0], [8, 1, 1, 3, 3]], is_similar=True, layers=[4, 2])
    assert whole.enters(1, 10) is None
    found = whole.merged(part).enters(1, 10)
    assert found is not None
    assert found.tolist() == [-1, -1, -1, -1, 4, 4, 4, 2, -1]


@pytest.mark.parametrize("chunk_work", [None, 40])
def test_a_rejected_segment_is_computed_in_full_though_its_tokens_entered(
    chunk_work: int | None, monkeypatch: Patch
) -> None:
    """The acceptance test: as full prefill, all of it, at all layers."""
    world = World(monkeypatch, cuts=(2,))
    donor = computed(world)
    plan = entering(donor, at_cut(2), at=5, always=[0, 1, 2])
    first, stop = np.array([5], np.int32), np.array([5 + COUNT], np.int32)
    plan = checked(plan, Check(first, stop, halo_tokens=3, max_drift=0.0))
    plan.reports = True
    [outcome] = finish(
        world.prefill.compute(world.prefill.prepare([plan], chunk_work))
    ).outcomes.values()
    assert outcome.acceptance is not None
    assert outcome.computed == 8, "those that entered do not count"
    assert outcome.acceptance.added == outcome.acceptance.again == COUNT - 3
    found = [held(world, plan, layer).clone() for layer in range(LAYERS)]
    world.prefill.run([plan.in_full()])
    for layer in range(LAYERS):
        torch.testing.assert_close(found[layer], held(world, plan, layer))


def test_tokens_that_entered_behind_a_rejected_segment_are_computed_with_it(
    monkeypatch: Patch,
) -> None:
    """They have attended to what is replaced."""
    world = World(monkeypatch, cuts=(2,))
    plan = entering(computed(world), np.repeat([-1, 2], COUNT // 2), always=[0, 1, 18])
    first, stop = np.array([0, 18], np.int32), np.array([18, COUNT], np.int32)
    plan = checked(plan, Check(first, stop, halo_tokens=1, max_drift=0.5))
    second = second_round(plan, [0.9, 0.1], plan.recipe.always)
    assert second is not None
    assert np.flatnonzero(~second.recipe.always).tolist() == [0, 1]
    assert second.recipe.program == Fixed()
    behind = second_round(plan, [0.1, 0.9], plan.recipe.always)
    assert behind is not None
    assert np.flatnonzero(behind.recipe.always).tolist() == list(range(19, COUNT))
