# SPDX-License-Identifier: Apache-2.0
"""Where donors do not all fit beside their request, as many are reused as do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stateful.world import SIZE, Ask, Setup, World
from vllm_segreuse.plan import FreezeOrder

DOCUMENT = [*range(100, 100 + 8 * SIZE)]
OTHER = [*range(200, 200 + 4 * SIZE)]
OPTIONS = {"segreuse_policy": "shift", "segreuse_min_reused_tokens": SIZE, "segreuse_explain": True}


def cached(*documents: list[int], freeze: FreezeOrder | None = None) -> World:
    """A world whose cache has these."""
    world = World(Setup(60, max_step_tokens=64))
    world.reports = {}
    for document in documents:
        world.add(Ask(tokens=list(document), keys=("a",), max_tokens=1, freeze=freeze))
        while world.live:
            world.step()
    return world


def read(world: World, tokens: list[int], room: int) -> dict[str, Any]:
    """The report of a request beside which so many blocks are left for donors."""
    needed = -(-(len(tokens) + 1) // SIZE)
    # The free blocks that are cached are the last ones to be taken.
    world.hold(world.pool.get_num_free_blocks() - needed - room)
    ask = Ask(tokens=tokens, keys=("a",), max_tokens=1, options=OPTIONS)
    name = world.add(ask).request_id
    while world.live:
        world.step()
        world.check()
    assert world.reports is not None
    return world.reports[name]


@pytest.mark.parametrize("room", range(10))
def test_as_much_is_reused_as_there_is_room_for(room: int) -> None:
    world = cached(DOCUMENT)
    report = read(world, [7, *DOCUMENT, 8], room)
    assert report["reused_tokens"] == SIZE * min(8, room)
    assert report["bypass_reason"] == (None if room else "no_free_blocks")
    if 0 < room < 8:
        reasons = {part["reason"]: part["tokens"] for part in report["explain"] if "reason" in part}
        assert reasons["no_free_blocks"] == SIZE * (8 - room)
    world.drain()


@given(st.permutations([DOCUMENT, OTHER]), st.integers(0, 13), st.integers(0, 3))
def test_donors_never_take_more_than_there_is(
    documents: list[list[int]], room: int, shift: int
) -> None:
    world = cached(DOCUMENT, OTHER)
    prompt = [*range(7, 8 + shift), *documents[0], 5, *documents[1], 6]
    report = read(world, prompt, room)
    assert report["reused_tokens"] == SIZE * min(12, room)
    assert world.counts["preemptions"] == 0
    world.drain()


def test_donors_that_others_hold_take_no_room() -> None:
    """A frozen document is reused from a pool that has nothing to spare."""
    world = cached([2, *DOCUMENT], freeze=FreezeOrder("doc", 0, 1, 1))
    assert world.side.call("frozen")["warm"]
    report = read(world, [7, *DOCUMENT, 8], 0)
    assert report["reused_tokens"] == len(DOCUMENT) - 1, "its last token is in no frozen block"
    world.drain()


def test_donors_that_are_in_the_prefix_hit_take_no_room_twice() -> None:
    world = cached(OTHER)
    report = read(world, [*OTHER, 5, *OTHER, 6], 0)
    assert (report["prefix_tokens"], report["reused_tokens"]) == (len(OTHER), len(OTHER))
    world.drain()


def test_too_little_room_for_what_is_asked_for_is_none() -> None:
    world = cached(DOCUMENT)
    options = OPTIONS | {"segreuse_min_reused_tokens": 5 * SIZE}
    needed = -(-(len(DOCUMENT) + 3) // SIZE)
    world.hold(world.pool.get_num_free_blocks() - needed - 4)
    ask = Ask(tokens=[7, *DOCUMENT, 8], keys=("a",), max_tokens=1, options=options)
    name = world.add(ask).request_id
    while world.live:
        world.step()
    assert world.reports is not None
    assert world.reports[name]["bypass_reason"] == "no_free_blocks"
    world.drain()
