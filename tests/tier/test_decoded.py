# SPDX-License-Identifier: Apache-2.0
"""What was read from a record of a codec that rounds is not rounded a second time."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tier.test_store import DOCUMENT, stored
from tests.tier.world import SIZE, World
from vllm_segreuse.plan import Pieces, Recipe, ReusePlan, Tier


def plan(blocks: list[int], pieces: list[tuple[int, ...]], host: list[bool]) -> ReusePlan:
    """Of the tokens in these blocks; pieces as (destination, length, block, offset, position)."""
    stop = SIZE * len(blocks)
    source = np.array([Tier.HOST if each else Tier.GPU for each in host], np.int8)
    found = replace(Pieces.from_table(pieces), source=source)
    recipe = Recipe.without_choice(np.zeros(stop, np.bool_))
    ids, tokens = np.array(blocks, np.int32), np.zeros(stop, np.int32)
    return ReusePlan("request", 0, stop, tokens, found, recipe, [], 0, ids)


def evicted(world: World, blocks: list[int]) -> int:
    """How many of the blocks are stored as they are evicted."""
    world.evict(blocks)
    orders = world.step()
    return 0 if orders is None else len(orders.rows)


def filled(world: World, tokens: list[int], depth: int) -> list[int]:
    blocks = world.compute(tokens, depth=depth)
    world.step()
    return blocks


def test_what_was_decoded_is_not_stored_again() -> None:
    """Nor what holds a single token of it; what the same plan computed is."""
    world = World(rows=20, codec="int8")
    stored(world)
    blocks = filled(world, [*range(300, 312)], depth=1)
    world.tier.note_plans([plan(blocks, [(0, SIZE + 1, 0, 0, 0)], [True])])
    assert evicted(world, blocks) == 1
    assert world.stats.data["tier_dropped_total"] == {"decoded": 2}
    assert not len(world.match([*range(300, 308)]).pieces)
    world.check_idle()


def test_what_came_from_the_gpu_is_stored() -> None:
    world = World(rows=20, codec="fp8")
    blocks = filled(world, DOCUMENT, depth=1)
    world.tier.note_plans([plan(blocks, [(0, 3 * SIZE, 0, 0, 0)], [False])])
    assert evicted(world, blocks) == 3


def test_copies_of_what_was_decoded_are_not_stored() -> None:
    """Nor copies of copies."""
    world = World(blocks=12, rows=20, codec="int8")
    stored(world)
    first = filled(world, [*range(300, 312)], depth=1)
    world.tier.note_plans([plan(first, [(0, SIZE, 0, 0, 0)], [True])])
    copies = [(SIZE * i, SIZE, block, 0, 0) for i, block in enumerate(first)]
    second = filled(world, [*range(400, 412)], depth=2)
    world.tier.note_plans([plan(second, copies, [False] * 3)])
    # A donor that the same plan writes.
    world.tier.note_plans([plan(second, [(0, SIZE, second[0], 0, 0)], [False])])
    assert evicted(world, second) == 2
    assert world.stats.data["tier_dropped_total"] == {"decoded": 1}
    assert evicted(world, first) == 2


def test_raw_records_are_stored_again() -> None:
    world = World(rows=20)
    blocks = filled(world, DOCUMENT, depth=1)
    world.tier.note_plans([plan(blocks, [(0, 3 * SIZE, 0, 0, 0)], [True])])
    assert evicted(world, blocks) == 3


def test_blocks_that_are_computed_or_filled_anew_are_stored() -> None:
    world = World(rows=20, codec="int8")
    blocks = filled(world, DOCUMENT, depth=0)  # a preempted plan's blocks, say
    world.tier.note_plans([plan(blocks, [(0, 3 * SIZE, 0, 0, 0)], [True])])
    assert evicted(world, blocks) == 3
    again = filled(world, [*range(400, 412)], depth=1)
    world.tier.note_plans([plan(again, [(0, 3 * SIZE, 0, 0, 0)], [True])])
    world.tier.note_plans([plan(again, [(0, SIZE, 0, 0, 0)], [True])])
    assert evicted(world, again) == 2


@pytest.mark.parametrize("end", ["evicted", "reset"])
def test_what_vllm_computes_where_a_record_was_decoded_once_is_stored(end: str) -> None:
    """Behind the plan of another request, say; blocks of moved tokens are not in the index."""
    world = World(blocks=16, rows=40, codec="int8")
    stored(world)
    blocks = filled(world, [*range(300, 312)], depth=1)
    assert evicted(world, blocks) == 3
    world.tier.note_plans([plan(blocks, [(0, 3 * SIZE, 0, 0, 0)], [True])])
    if end == "evicted":
        assert evicted(world, blocks) == 0
    else:
        world.reset()
    world.take_next(blocks)
    answer = filled(world, [*range(700, 712)], depth=1)
    assert sorted(answer) == sorted(blocks)
    copy = filled(world, [*range(800, 812)], depth=1)
    pieces = [(SIZE * i, SIZE, block, 0, 0) for i, block in enumerate(answer)]
    world.tier.note_plans([plan(copy, pieces, [False] * 3)])
    assert evicted(world, answer) == 3
    assert evicted(world, copy) == 3, "nor does it spread"
    assert "tier_dropped_total" not in world.stats.data


def test_where_only_documents_are_stored_nothing_is_dropped_as_decoded() -> None:
    """They are exact; nothing else is stored, so that nothing needs to be known of plans."""
    world = World(rows=20, codec="int8", admission="knowledge")
    blocks = filled(world, DOCUMENT, depth=0)
    world.tier.note_plans([plan(blocks, [(0, 3 * SIZE, 0, 0, 0)], [True])])
    world.tier.documents.keep("doc", 0, 1, blocks)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}
