# SPDX-License-Identifier: Apache-2.0
"""Records and blocks of the pool that followed each other are linked, whoever was evicted first."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.tier.world import SIZE, World
from vllm_segreuse.plan import Tier

DOCUMENT = [*range(100, 112)]


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_runs_grow_whatever_order_blocks_are_evicted_in(order: tuple[int, ...]) -> None:
    world = World(rows=8)
    blocks = world.compute(DOCUMENT)
    world.step()
    for place in order:
        world.evict([blocks[place]])
        world.step()
        prompt = DOCUMENT[SIZE - 1 : 2 * SIZE + 1]  # one whole block, one token at each side
        assert world.match(prompt).num_tokens == len(prompt)
        world.check()
    assert (world.match(DOCUMENT).pieces.source == Tier.HOST).all()
    assert world.match(DOCUMENT).num_segments == 1


def test_a_block_that_is_evicted_again_hands_its_neighbours_to_its_record() -> None:
    world = World(rows=8)
    first = world.compute(DOCUMENT[:SIZE])
    world.step()
    world.evict(first)
    world.step()
    blocks = world.compute(DOCUMENT)  # its first block has a record already
    world.step()
    world.evict(blocks[:1])
    world.step()
    prompt = DOCUMENT[SIZE - 1 : 2 * SIZE]
    assert world.match(prompt).pieces.source.tolist() == [Tier.HOST, Tier.GPU]
    world.check_idle()


def test_records_are_removed_with_their_families() -> None:
    world = World(rows=3)
    for first in (100, 200, 300):
        blocks = world.compute([*range(first, first + 12)])
        world.step()
        world.evict(blocks)
        world.step()
        world.check_idle()
    assert len(world.catalogue) == 3
    assert len(world.catalogue._children) == 2


def test_what_the_index_has_no_room_for_is_not_found() -> None:
    world = World(rows=2)
    world.catalogue._next = world.index.num_blocks - 1
    blocks = world.compute(DOCUMENT[:8])
    world.step()
    world.evict(blocks)
    world.step()
    assert world.match(DOCUMENT).num_tokens == SIZE
    world.check_idle()
