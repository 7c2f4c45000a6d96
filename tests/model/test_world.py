# SPDX-License-Identifier: Apache-2.0
"""What the models found, once more and by hand."""

from tests.model.world import Ask, Setup, World


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
