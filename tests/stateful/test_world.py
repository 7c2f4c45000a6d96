# SPDX-License-Identifier: Apache-2.0
"""What the models found, once more and by hand."""

from vllm.v1.request import Request

from tests.stateful.world import DOCUMENTS, Ask, Setup, World
from vllm_segreuse.plan import FreezeOrder


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
    world.frozen._max_in_use = world.pool.num_gpu_blocks
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


def _word_under_way() -> tuple[World, Request]:
    """Others decode; the step that has left last says that a request's spread plan is done."""
    world = World(Setup(40, in_flight=2, spread_tokens=1))
    world.add(Ask(tokens=list(DOCUMENTS[0]), keys=("a",), max_tokens=1))
    for seed in range(4):  # some of whom have not met the token that ends them
        world.add(Ask(tokens=[*range(200, 205)], max_tokens=40, seed=seed))
    for _ in range(3):
        world.step()
    while world.under_way:
        world.complete()
    options = {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 4}
    tokens = [90, 91, 92, *DOCUMENTS[0], 93]
    request = world.add(Ask(tokens=tokens, keys=("a",), options=options))
    world.schedule()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    while not _is_done(world, request):
        if not world.may_schedule:
            world.complete()
        world.schedule()
    return world, request


def _is_done(world: World, request: Request) -> bool:
    told = world.under_way[-1][1].kv_connector_output
    return told is not None and request.request_id in told.finished_recving


def test_26_a_late_word_of_a_plan_that_was_called_back_is_not_heard() -> None:
    world, request = _word_under_way()
    assert world.reset(preempt=True)
    assert request.status.name == "WAITING"
    while world.under_way:
        world.complete()
        world.check()
    world.drain()
    assert request.status.name.startswith("FINISHED")


def test_22_an_end_while_the_word_is_under_way_is_told_once() -> None:
    world, request = _word_under_way()
    world.abort(request)
    world.check()
    world.drain()
