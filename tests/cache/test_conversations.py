# SPDX-License-Identifier: Apache-2.0
"""What an earlier turn of a conversation has moved is kept as it is: by whom, and how long."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from segreuse_extras.conversations.conversations import Conversations
from tests.parts import parts_of
from tests.test_scheduler import DOCUMENT, OPTIONS, SIZE, World
from vllm_segreuse.compat.block_events import NamedBlocks
from vllm_segreuse.options.server import OBSERVE, Switch
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.tracked import NOTHING_LEFT, LeftBehind

ONCE = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_once": 1}
RATIO = {"segreuse_recompute_ratio": 0.25}
HISTORY = [7, *DOCUMENT, *range(8, 19)]
"""A new first token in front of the document, in whole blocks."""
NEXT = [*HISTORY, *range(20, 27)]


def turns(first: dict[str, Any], second: dict[str, Any], **options: Any) -> World:
    """A conversation's second turn; its first one moves a document."""
    world = World(min_reused_tokens=4, **options)
    world.run(world.add(DOCUMENT, first))
    world.run(world.add(HISTORY, first | RATIO))
    assert world.plans[0].num_recomputed > 0, "something is chosen at the first turn"
    second_turn(world, second)
    return world


def second_turn(world: World, options: dict[str, Any], **fields: Any) -> Request:
    request = world.add(NEXT, RATIO | options, **fields)
    world.run(request)
    return request


def test_the_next_turn_takes_the_blocks_of_the_one_before() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    left = kept_blocks(world)
    request = second_turn(world, ONCE)
    assert world.taken == len(HISTORY)
    assert world.plans == [], "nothing is copied"
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    assert tracked.left_behind == LeftBehind(0, len(HISTORY), left, 0)
    report = world.report(request)
    assert report["bypass_reason"] is None
    assert (report["prefix_tokens"], report["reused_tokens"]) == (0, len(HISTORY))
    assert (report["recomputed_tokens"], report["new_tokens"]) == (0, len(NEXT) - len(HISTORY))
    assert report["matches"] == 1
    assert report["computed_share"] == round(1 - len(HISTORY) / len(NEXT), 4)


def test_what_is_found_behind_it_is_moved() -> None:
    world = World(min_reused_tokens=4, max_model_len=1024)
    other = [*range(300, 332)]
    world.run(world.add(other, ONCE))
    history(world)
    request = world.add([*HISTORY, 1, *other, 2], ONCE | {"segreuse_policy": "shift"})
    assert world.run(request) == 1 + len(other)
    assert world.taken == len(HISTORY)
    assert world.plans[0].start == len(HISTORY)
    assert world.plans[0].num_reused == len(other)
    report = world.report(request)
    assert report["prefix_tokens"] == 0
    assert report["reused_tokens"] == len(HISTORY) + len(other)
    assert report["matches"] == 2
    assert report["computed_share"] == round(2 / (len(HISTORY) + len(other) + 2), 4)


def test_what_is_taken_has_no_exact_names_nor_what_is_computed_behind_it() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    second_turn(world, ONCE)
    assert len(parts_of(world.side).conversations) == len(NEXT) // SIZE
    plain = world.add(NEXT, None)
    assert (world.pool.resident_blocks(plain, 0, len(NEXT) // SIZE) < 0).all()


def test_without_the_option_a_policy_chooses_anew() -> None:
    off = ONCE | {"segreuse_recompute_once": 0}
    world = turns(off, off)
    assert world.taken == 0
    assert world.plans[0].num_recomputed > 0


@pytest.mark.parametrize("which", [0, 1])
def test_who_does_not_ask_for_it_neither_leaves_such_blocks_nor_finds_them(which: int) -> None:
    asked = [ONCE, ONCE]
    asked[which] = ONCE | {"segreuse_recompute_once": 0}
    assert turns(*asked).taken == 0


def test_the_server_may_ask_for_it_for_all() -> None:
    options = {key: value for key, value in ONCE.items() if key != "segreuse_recompute_once"}
    assert turns(options, options, recompute_once=True).taken == len(HISTORY)


def test_everything_is_computed_again_where_that_is_wanted() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    second_turn(world, ONCE | {"segreuse_recompute_ratio": 1.0})
    assert world.taken == 0
    assert world.plans[0].num_recomputed == world.plans[0].num_reused >= len(DOCUMENT)


@pytest.mark.parametrize(("least", "taken"), [(len(HISTORY), len(HISTORY)), (len(HISTORY) + 1, 0)])
def test_less_than_the_least_is_not_taken(least: int, taken: int) -> None:
    world = World(min_reused_tokens=4)
    history(world)
    second_turn(world, ONCE | {"segreuse_min_reused_tokens": least})
    assert world.taken == taken


@pytest.mark.parametrize("switch", [False, OBSERVE])
def test_nothing_is_taken_while_reuse_is_off_or_only_observed(switch: Switch) -> None:
    world = World(min_reused_tokens=4)
    history(world)
    world.side.set_enabled(switch)
    second_turn(world, ONCE)
    assert world.taken == 0


def test_a_request_that_only_observes_takes_nothing() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    second_turn(world, ONCE | {"segreuse_observe": True})
    assert world.taken == 0


def history(world: World) -> None:
    world.run(world.add(DOCUMENT, ONCE))
    world.run(world.add(HISTORY, ONCE | RATIO))


def kept_blocks(world: World) -> list[int]:
    """The blocks that an earlier turn has left, ascending: in the order of their text."""
    kept = parts_of(world.side).conversations
    return [block.block_id for block in world.pool.blocks if block.block_id in kept]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"extra_keys": "others"}, {}),
        ({}, {"cache_salt": "another"}),
    ],
)
def test_other_namespaces_find_nothing(options: dict[str, Any], fields: dict[str, Any]) -> None:
    world = World(min_reused_tokens=4)
    history(world)
    assert len(parts_of(world.side).conversations) == len(HISTORY) // SIZE
    second_turn(world, ONCE | options, **fields)
    assert world.taken == 0


def test_another_prefix_is_another_conversation() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    prompt = [6, *NEXT[1:]]
    world.run(world.add(prompt, ONCE | RATIO))
    assert world.taken == 0
    assert world.plans[0].num_recomputed > 0


def test_what_was_evicted_is_forgotten_and_what_stands_behind_it_not_reached() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    kept = parts_of(world.side).conversations
    third = kept_blocks(world)[2]
    world.pool.evict_blocks({third})
    assert len(kept) == len(HISTORY) // SIZE - 1
    second_turn(world, ONCE)
    assert world.taken == 2 * SIZE
    moved = world.plans[0].pieces
    document = moved.where(moved.destination < len(DOCUMENT))
    shift = document.destination - document.position
    assert len(shift)
    assert (shift == 1).all(), "the document is moved from where it was"


def test_the_newest_copy_is_found_once_an_older_one_is_gone() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    old = kept_blocks(world)
    world.run(world.add(HISTORY, ONCE | {"segreuse_recompute_ratio": 1.0}))
    assert world.taken == 0
    world.pool.evict_blocks({*old})
    second_turn(world, ONCE)
    assert world.taken == len(HISTORY)


def test_a_block_named_in_this_step_holds_nothing_yet() -> None:
    world = World(min_reused_tokens=4)
    world.run(world.add(DOCUMENT, ONCE))
    first = world.add(HISTORY, ONCE | RATIO)
    world.match(first, 0)
    full = first.num_tokens // SIZE
    blocks = world.pool.get_new_blocks(full + 1)
    world.pool.cache_full_blocks(first, blocks, 0, full, SIZE, 0)
    world.side.allocated(first, [block.block_id for block in blocks])
    second = world.add(NEXT, ONCE | RATIO)
    assert not world.pool.left_behind(second.request_id, 0, len(NEXT) - 1)
    world.side.take_step(True)
    second_turn(world, ONCE)
    assert world.taken == len(HISTORY)


def test_a_block_freed_in_the_step_that_named_it_is_forgotten() -> None:
    world = World(min_reused_tokens=4)
    world.run(world.add(DOCUMENT, ONCE))
    request = world.add(HISTORY, ONCE | RATIO)
    world.match(request, 0)
    full = request.num_tokens // SIZE
    blocks = world.pool.get_new_blocks(full + 1)
    world.pool.cache_full_blocks(request, blocks, 0, full, SIZE, 0)
    assert len(parts_of(world.side).conversations) == full
    world.pool.free_blocks(reversed(blocks))  # preempted
    assert len(parts_of(world.side).conversations) == 0


def test_a_reset_forgets_all() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    assert world.pool.reset_prefix_cache()
    assert len(parts_of(world.side).conversations) == 0
    second_turn(world, ONCE)
    assert (world.taken, world.plans) == (0, [])


def test_a_conversation_is_no_deeper_after_many_turns() -> None:
    world = World(min_reused_tokens=4, max_model_len=512, max_provenance_depth=1)
    history(world)
    prompt = HISTORY
    for turn in range(4):
        prompt = [*prompt, *range(40 + 9 * turn, 40 + 9 * turn + SIZE)]
        request = world.add([*prompt, 1], ONCE | RATIO)
        world.run(request)
        tracked = parts_of(world.side).planner.get(request.request_id)
        assert tracked is not None
        assert world.taken >= len(prompt) - 3 * SIZE
        assert tracked.donor_depth == 0


def test_what_is_restored_is_left_to_the_prefix_cache() -> None:
    world = World(min_reused_tokens=4)
    arrived = parts_of(world.side).planner.get(world.add(HISTORY, ONCE).request_id)
    assert arrived is not None
    prompt = arrived.prompt
    tracked = SimpleNamespace(
        request_id="one",
        prompt=prompt,
        donates=True,
        donor_depth=2,
        exact_ends=(SIZE, 3 * SIZE),
    )
    requests: Any = {"one": tracked}
    kept = Conversations(requests, parts_of(world.side).namespaces, Health(), SIZE)
    kept.take_part("one")
    kept.named(NamedBlocks("one", 1, [11, 12, 13, 14], 10, HISTORY))
    kept.begin_step()
    assert len(kept) == 2
    assert kept.found(prompt, 0, 40) == NOTHING_LEFT
    assert kept.found(prompt, 3 * SIZE, 40) == LeftBehind(3 * SIZE, 5 * SIZE, [13, 14], 2)
    assert kept.found(prompt, 4 * SIZE, 40) == LeftBehind(4 * SIZE, 5 * SIZE, [14], 2)
    assert kept.found(prompt, 3 * SIZE, 4 * SIZE + 3) == LeftBehind(3 * SIZE, 4 * SIZE, [13], 2)


def test_in_a_namespace_that_has_drifted_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(min_reused_tokens=4, audit={"fallback": {"policy": "focus"}})
    history(world)
    monkeypatch.setattr(parts_of(world.side).audits, "falls_back", lambda _: True)
    second_turn(world, ONCE)
    assert world.taken == 0


def test_what_is_computed_behind_it_is_as_deep_as_at_the_turn_before() -> None:
    world = World(min_reused_tokens=4, max_model_len=512)
    history(world)
    tracked = world.add([5, *HISTORY, *range(30, 36)], ONCE | RATIO)  # computed behind depth 1
    world.run(tracked)
    assert world.plans[0].donor_depth == 1
    request = world.add([5, *HISTORY, *range(30, 40)], ONCE | RATIO)
    world.run(request)
    assert world.taken >= len(HISTORY)
    after = parts_of(world.side).planner.get(request.request_id)
    assert after is not None
    assert after.donor_depth == 1


def test_a_policy_that_reuses_what_is_exact_only_ignores_it() -> None:
    exact = ONCE | {"segreuse_policy": "exact"}
    world = World(min_reused_tokens=4)
    request = world.add(NEXT, exact)
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    assert tracked.method.finder.is_exact
    assert parts_of(world.side).conversations.found not in tracked.method.left_behind


def test_an_error_ends_reuse_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(min_reused_tokens=4)
    world.run(world.add(DOCUMENT, ONCE))
    kept = parts_of(world.side).conversations
    monkeypatch.setattr(kept, "_keep", lambda *_: 1 / 0)
    world.run(world.add(HISTORY, ONCE | RATIO))
    assert parts_of(world.side).health.broken
    second_turn(world, ONCE)
    assert (world.taken, world.plans) == (0, [])


def test_an_error_in_the_search_costs_the_request_its_reuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(min_reused_tokens=4)
    history(world)
    monkeypatch.setattr(parts_of(world.side).conversations, "_names", lambda *_: 1 / 0)
    request = second_turn(world, ONCE)
    assert (world.taken, world.plans) == (0, [])
    monkeypatch.undo()
    assert world.report(request)["bypass_reason"] == "error"
    second_turn(world, ONCE)
    assert world.taken == len(HISTORY), "the next one is served as ever"


def test_what_is_taken_is_explained() -> None:
    world = World(min_reused_tokens=4, max_model_len=1024)
    history(world)
    request = second_turn(world, ONCE | {"segreuse_explain": True})
    taken, *others = world.report(request)["explain"]
    segment = {"source": "segment", "position": 0, "in_context": True, "recomputed": []}
    assert taken == {"start": 0, "tokens": len(HISTORY)} | segment
    assert sum(each["tokens"] for each in others) == len(NEXT) - len(HISTORY)
    assert others[0]["start"] == len(HISTORY)


def test_what_is_computed_although_it_was_found_is_explained() -> None:
    """By a budget of its own, `focus` computes all of so little, and the question twice."""
    world = World(min_reused_tokens=4, max_model_len=1024)
    other = [*range(300, 332)]
    world.run(world.add(other, ONCE))
    history(world)
    request = world.add([*HISTORY, *other, 1, 2, 3], ONCE | {"segreuse_explain": True})
    world.run(request)
    assert world.taken == len(HISTORY)
    assert world.plans == []
    taken, found, *_ = world.report(request)["explain"]
    assert taken["in_context"]
    assert found["reason"] == "not_worth_it"
    assert found["start"] == len(HISTORY)
    asked = world.add([*HISTORY, 4, *other, 5, 6], ONCE | {"segreuse_recompute_ratio": 0.5})
    world.run(asked)
    assert world.plans[0].num_reused == len(other), "a share is taken as it is"


def test_nothing_is_left_out_of_what_a_pass_cannot_compute() -> None:
    """Kept tokens of a named document, computed as a text, would be those of another."""
    world = World(min_reused_tokens=4)
    for options, may in ((ONCE, True), (ONCE | {"segreuse_documents": ["kb/doc"]}, False)):
        tracked = parts_of(world.side).planner.get(world.add(NEXT, options).request_id)
        assert tracked is not None
        continues = parts_of(world.side).conversations.found in tracked.method.left_behind
        assert (tracked.method.work is not None) == continues == may
