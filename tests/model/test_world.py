# SPDX-License-Identifier: Apache-2.0
"""What the models found, once more and by hand."""

from tests.model.world import DOCUMENTS, Ask, Setup, World
from vllm_segreuse.cache.frozen import FreezeOrder


def test_a_request_preempted_in_the_step_that_scheduled_it_leaves_no_names() -> None:
    """vLLM names its blocks as it schedules it; nobody will compute them."""
    world = World(
        Setup(12, priority=True, max_step_tokens=16, long_prompt_tokens=8, whole_prompts=False)
    )
    long = world.add(Ask(tokens=[*range(100, 136)], priority=2))
    world.step()
    urgent = world.add(Ask(tokens=[5, 6, 7, 8], max_tokens=12))
    world.step()
    assert (long.num_computed_tokens, urgent.num_computed_tokens) == (24, 4)
    world.hold(world.pool.get_num_free_blocks() - 2)  # what the long one takes
    world.step()
    assert long.status.name == "PREEMPTED"
    world.check()
    world.drain()


def _frozen_world() -> World:
    """Of 39 blocks, 4 hold a frozen document."""
    world = World(Setup(40, max_step_tokens=64, max_running=3))
    tokens = [2, *DOCUMENTS[0][:15]]
    world.add(Ask(tokens=tokens, keys=("a",), max_tokens=1, freeze=FreezeOrder("doc", 0, 1, 1)))
    world.step()
    assert world.side.frozen()["warm"] == {"doc": [4, 0]}
    return world


def test_23_frozen_blocks_go_before_anybody_is_preempted() -> None:
    world = _frozen_world()
    for first in (100, 200):
        world.add(Ask(tokens=[*range(first, first + 60)], max_tokens=4))
    world.step()  # the first has 15 blocks, the second the first of its 15
    world.hold(world.pool.get_num_free_blocks() - 13)
    while world.live:
        world.step()
        world.check()
    assert world.counts["preemptions"] == 0
    assert world.side.frozen()["given_back"] == 1
    world.drain()


def test_23_no_frozen_block_goes_for_a_request_that_has_to_wait_anyway() -> None:
    world = _frozen_world()
    world.hold(world.pool.get_num_free_blocks() - 4)  # 90 % of the blocks are not in use
    world.pool.frozen._max_in_use = world.pool.num_gpu_blocks
    world.add(Ask(tokens=[*range(100, 160)], max_tokens=1))
    world.step()
    assert world.side.frozen()["given_back"] == 0
    world.drain()


def test_21_a_reader_is_waited_for() -> None:
    world = _frozen_world()
    world.add(Ask(tokens=[2, *DOCUMENTS[0][:15], *range(90, 99)], keys=("a",), max_tokens=9))
    world.step()
    assert world.side.frozen()["warm"]["doc"][1] >= 1, "its prefix is frozen"
    world.unfreeze(["doc"])
    world.check()
    world.drain()
