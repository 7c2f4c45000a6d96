# SPDX-License-Identifier: Apache-2.0
"""Whose changes are carried to whom: `tests/prefill/test_passes.py` compares the numbers with a
loop, here KV is moved, from several donors."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_drift import donated, values
from tests.prefill.test_executor import DONOR, plan
from tests.prefill.tiny import LAYERS, SIZE, World, make_plan
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.plan import Gather, Probed, ReusePlan
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.carried import FROM_BEHIND, FROM_THE_FRONT

CARRIED: dict[str, Any] = {
    "program": Probed(Gather.SUM_AND_LAST, first_layer=2, carries=True),
    "top_k": 3,
}
KEPT: dict[str, Any] = {"program": Probed(Gather.SUM_AND_LAST, first_layer=2), "top_k": 3}
ADJOINING = [(5, 8, DONOR, 0, 0), (13, 8, DONOR + 5, 0, 60)]


def side_by_side(top_k: int = 3) -> ReusePlan:
    """Two segments of eight tokens, of two sequences, with nothing between them."""
    recipe = {**CARRIED, "top_k": top_k}
    return make_plan("one", 4, [0, 17, 18], 19, np.arange(10, 16), pieces=ADJOINING, **recipe)


def carried(world: World, one: ReusePlan) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """By reused token and layer, how far its value is from what was moved: expected, by the values
    of the tokens that were computed again, and found."""
    moved = donated(world, one)
    world.prefill.run([one])
    found = values(world, one) - moved
    # At the last layer nothing is carried: what has changed there was computed again.
    chosen = np.flatnonzero(np.abs(found[:, -1]).max((1, 2)) > 1e-6).tolist()
    assert 0 < len(chosen) <= one.recipe.top_k
    expected = np.zeros_like(found)
    expected[chosen] = found[chosen]
    for token in range(len(found)):
        near_by = [i for i in chosen if i // 8 == token // 8]
        in_front, behind = [i for i in near_by if i < token], [i for i in near_by if i > token]
        for others, of in ((in_front[-1:], FROM_THE_FRONT), (behind[:1], FROM_BEHIND)):
            for other in others if token not in chosen else ():
                share = of.values.common + of.values.near * np.exp(
                    -abs(other - token) / of.values.reach
                )
                expected[token, :-1] += share * found[other, :-1]
    return expected, found


def test_tokens_take_part_in_the_changes_of_those_in_front_and_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, found = carried(World(monkeypatch), side_by_side())
    np.testing.assert_allclose(found, expected, atol=1e-5)
    taking_part = np.abs(expected[:, 0]).max((1, 2)) > 0
    assert taking_part.sum() >= 8, "all of a segment that has one"


def test_nothing_is_carried_into_another_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is chosen: of the first segment or of the second."""
    expected, found = carried(World(monkeypatch), side_by_side(top_k=1))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_nor_across_what_is_not_reused() -> None:
    apart = plan("one", 10, **CARRIED)  # two segments, and a new token between them
    runs = Batch([apart, side_by_side()], SIZE, torch.device("cpu")).runs_of_candidates
    of_apart, of_adjoining = runs[: apart.num_written], runs[apart.num_written :]
    assert (of_apart >= 0).tolist() == apart.recipe.candidates.tolist()
    assert len(set(of_apart[1:9])) == len(set(of_apart[10:18])) == 1
    assert len(set(of_adjoining[1:9])) == len(set(of_adjoining[9:17])) == 1
    assert len(set(runs[runs >= 0])) == 4


def test_without_a_change_nothing_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed in this very context stays as it was."""
    world = World(monkeypatch)
    source = plan("source", 40, **CARRIED).in_full()
    world.prefill.run([source])
    again = plan("again", 50, **CARRIED)
    again.pieces = type(again.pieces).from_table(
        [
            (at, 1, int(source.block_ids[at // SIZE]), at % SIZE, at)
            for at in range(again.start, again.stop)
            if again.reused[at - again.start]
        ]
    )
    again.token_ids = source.token_ids
    for cache in world.caches:  # the prefix hit of both
        cache[50] = cache[40]
    before = donated(world, again)
    world.prefill.run([again])
    np.testing.assert_allclose(values(world, again), before, atol=1e-5)


def test_the_change_reaches_what_reads_those_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(recipe: dict[str, Any]) -> np.ndarray[Any, Any]:
        world = World(monkeypatch)
        one = plan("one", 10, **recipe)
        world.prefill.run([one])
        return np.array([cache[15, 0, :, 3].numpy() for cache in world.caches])

    with_carried, without = left(CARRIED), left(KEPT)
    assert len(with_carried) == LAYERS
    np.testing.assert_allclose(with_carried[0], without[0], atol=1e-6)
    assert np.abs(with_carried[-1] - without[-1]).max() > 1e-3


def test_changes_of_keys_turn_by_the_distance_and_the_other_way_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one, seen = World(monkeypatch), side_by_side(), []
    rope = DeltaRope(torch.tensor([0.1], dtype=torch.float64), rotary_dim=2, neox=True)

    def noted(pages: torch.Tensor, parts: Any, before: Any, carried: Any) -> None:
        seen.append(carried)

    for number, layer in enumerate(world.layers.known):
        kernels = dataclasses.replace(layer.kernels, carry=noted)
        changed = dataclasses.replace(layer, kernels=kernels, rope=rope)
        world.layers.known[number] = changed
    world.prefill.run([one])
    position = {
        int(one.block_ids[at // SIZE]) * SIZE + at % SIZE: at for at in range(one.start, one.stop)
    }
    turned = []
    for carried in seen:
        for token, row in enumerate(carried.rows.tolist()):
            if row >= 0:
                there = position[int(carried.changed[row])]
                distance = position[int(carried.slots[token])] - there
                found = torch.cat([carried.cos, carried.sin], 1)[carried.distances[token]]
                expected = torch.tensor([np.cos(0.1 * distance), np.sin(0.1 * distance)])
                torch.testing.assert_close(found, expected.float())
                turned.append(distance)
    assert min(turned) < 0 < max(turned)


def test_nothing_is_carried_where_a_layer_has_no_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then no layer's changes are, as without `carries`."""

    def left(recipe: dict[str, Any], unable: int | None) -> list[torch.Tensor]:
        world = World(monkeypatch)
        for number in [] if unable is None else [unable]:
            layer = world.layers.known[number]
            kernels = dataclasses.replace(layer.kernels, carry=None)
            world.layers.known[number] = dataclasses.replace(layer, kernels=kernels)
        world.prefill.run([plan("one", 10, **recipe)])
        return world.caches

    kept = left(KEPT, None)
    for unable in (0, LAYERS - 1):
        for found, expected in zip(left(CARRIED, unable), kept, strict=True):
            torch.testing.assert_close(found, expected)
