# SPDX-License-Identifier: Apache-2.0
"""What an earlier turn of a conversation has moved is kept as it is: by whom, and how long."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from segreuse_tools.estimate.other_options import computed_by
from tests.parts import parts_of
from tests.test_scheduler import DOCUMENT, OPTIONS, SIZE, World
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.prompt import Memo, Prompt
from vllm_segreuse.compat.block_events import NamedBlocks
from vllm_segreuse.config import RequestOptions
from vllm_segreuse.features.conversations.conversations import ContinuingFinder, Conversations
from vllm_segreuse.plan import Pieces, ReusePlan
from vllm_segreuse.scheduling.health import Health

ONCE = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_once": 1}
RATIO = {"segreuse_recompute_ratio": 0.25}
HISTORY = [7, *DOCUMENT, *range(8, 19)]
"""A new first token in front of the document, in whole blocks."""
NEXT = [*HISTORY, *range(20, 27)]


def turns(first: dict[str, Any], second: dict[str, Any], **options: Any) -> ReusePlan | None:
    """The plan of a conversation's second turn; its first one moves a document."""
    world = World(min_reused_tokens=4, **options)
    world.run(world.add(DOCUMENT, first))
    world.run(world.add(HISTORY, first | RATIO))
    assert world.plans[0].num_recomputed > 0, "something is chosen at the first turn"
    return second_turn(world, second)


def second_turn(world: World, options: dict[str, Any], **fields: Any) -> ReusePlan | None:
    world.run(world.add(NEXT, options | RATIO, **fields))
    return world.plans[0] if world.plans else None


def in_context(plan: ReusePlan | None) -> int:
    """Tokens whose context is the same."""
    return 0 if plan is None else int(plan.pieces.length[plan.pieces.in_context].sum())


def test_the_next_turn_takes_what_was_moved_as_it_is() -> None:
    plan = turns(ONCE, ONCE)
    assert plan is not None
    assert in_context(plan) == plan.num_reused == len(HISTORY)
    assert plan.num_recomputed == 0
    assert not (plan.pieces.destination - plan.pieces.position).any()


def test_without_the_option_a_policy_chooses_anew() -> None:
    plan = turns(ONCE | {"segreuse_recompute_once": 0}, ONCE | {"segreuse_recompute_once": 0})
    assert plan is not None
    assert in_context(plan) < len(HISTORY) - len(DOCUMENT)
    assert plan.num_recomputed > 0


@pytest.mark.parametrize("which", [0, 1])
def test_who_does_not_ask_for_it_neither_leaves_such_blocks_nor_finds_them(which: int) -> None:
    asked = [ONCE, ONCE]
    asked[which] = ONCE | {"segreuse_recompute_once": 0}
    plan = turns(*asked)
    assert in_context(plan) < len(HISTORY) - len(DOCUMENT)


def test_the_server_may_ask_for_it_for_all() -> None:
    options = {key: value for key, value in ONCE.items() if key != "segreuse_recompute_once"}
    assert in_context(turns(options, options, recompute_once=True)) == len(HISTORY)


def test_everything_is_computed_again_where_that_is_wanted() -> None:
    world = World(min_reused_tokens=4)
    world.run(world.add(DOCUMENT, ONCE))
    world.run(world.add(HISTORY, ONCE | RATIO))
    world.run(world.add(NEXT, ONCE | {"segreuse_recompute_ratio": 1.0}))
    assert world.plans[0].num_recomputed == world.plans[0].num_reused == len(HISTORY)


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
    assert in_context(second_turn(world, ONCE | options, **fields)) == 0


def test_another_prefix_is_another_conversation() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    prompt = [6, *NEXT[1:]]
    world.run(world.add(prompt, ONCE | RATIO))
    assert in_context(world.plans[0]) == 0
    assert world.plans[0].num_recomputed > 0


def test_what_was_evicted_is_forgotten_and_what_stands_behind_it_not_reached() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    kept = parts_of(world.side).conversations
    third = kept_blocks(world)[2]
    world.pool.evict_blocks({third})
    assert len(kept) == len(HISTORY) // SIZE - 1
    plan = second_turn(world, ONCE)
    assert plan is not None
    assert plan.pieces.in_context[:2].all()
    behind = plan.pieces.destination >= 2 * SIZE
    document = behind & (plan.pieces.destination < len(DOCUMENT))
    assert not plan.pieces.in_context[document].any(), "the document is moved from where it was"


def test_the_newest_copy_is_found_once_an_older_one_is_gone() -> None:
    world = World(min_reused_tokens=4)
    history(world)
    old = kept_blocks(world)
    assert in_context(second_turn(world, ONCE)) == len(HISTORY)
    world.pool.evict_blocks({*old})
    assert in_context(second_turn(world, ONCE)) >= len(HISTORY)


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
    assert world.match(second, 0) is not None
    tracked = parts_of(world.side).planner.get(second.request_id)
    assert tracked is not None
    assert in_context(tracked.plan) == 0
    world.side.take_step(True)
    assert in_context(second_turn(world, ONCE)) == len(HISTORY)


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
    assert second_turn(world, ONCE) is None


def test_a_conversation_is_no_deeper_after_many_turns() -> None:
    world = World(min_reused_tokens=4, max_model_len=512, max_provenance_depth=1)
    history(world)
    prompt = HISTORY
    for turn in range(4):
        prompt = [*prompt, *range(40 + 9 * turn, 40 + 9 * turn + SIZE)]
        world.run(world.add([*prompt, 1], ONCE | RATIO))
        plan = world.plans[0]
        assert in_context(plan) == plan.num_reused >= len(prompt) - 2 * SIZE
        assert plan.donor_depth == 0


def test_the_token_behind_a_spread_plan_is_not_computed_when_its_block_is_named() -> None:
    world = World(min_reused_tokens=4, spread_tokens=1)
    world.run(world.add(DOCUMENT, ONCE))
    request = world.add(HISTORY, ONCE | RATIO)
    world.tables["another"] = [1]  # somebody runs
    assert world.side.match(request, 0) == (len(HISTORY), True)
    full = request.num_tokens // SIZE
    blocks = world.pool.get_new_blocks(full + 1)
    world.side.allocated(request, [block.block_id for block in blocks])
    world.side.take_step(True)
    world.pool.cache_full_blocks(request, blocks, 0, full, SIZE, 0)
    assert len(parts_of(world.side).conversations) == full - 1
    assert blocks[full - 1].block_id not in parts_of(world.side).conversations


def test_the_token_behind_a_spread_plan_is_computed_before_its_block_is_full() -> None:
    world = World(min_reused_tokens=4, spread_tokens=1)
    world.run(world.add(DOCUMENT, ONCE))
    request = world.add([*HISTORY, 1], ONCE | RATIO)
    world.tables["another"] = [1]  # somebody runs
    assert world.side.match(request, 0) == (len(HISTORY) + 1, True)
    full = request.num_tokens // SIZE
    blocks = world.pool.get_new_blocks(full + 1)
    world.side.allocated(request, [block.block_id for block in blocks])
    world.side.take_step(True)
    world.pool.cache_full_blocks(request, blocks, 0, full, SIZE, 0)
    assert len(parts_of(world.side).conversations) == full
    request.append_output_token_ids([2] * (SIZE - 1))
    world.pool.cache_full_blocks(request, blocks, full, full + 1, SIZE, 0)
    assert len(parts_of(world.side).conversations) == full + 1


def test_what_is_restored_is_left_to_the_prefix_cache() -> None:
    world = World(min_reused_tokens=4)
    arrived = parts_of(world.side).planner.get(world.add(HISTORY, ONCE).request_id)
    assert arrived is not None
    prompt = arrived.prompt
    plan = SimpleNamespace(exact_until=3 * SIZE, named_early=lambda size: None, donor_depth=0)
    tracked = SimpleNamespace(request_id="one", prompt=prompt, plan=plan, donates=True)
    requests: Any = {"one": tracked}
    kept = Conversations(requests, parts_of(world.side).namespaces, Health(), SIZE)
    kept.take_part("one")
    kept.named(NamedBlocks("one", 1, [11, 12, 13, 14], 10, HISTORY))
    kept.begin_step()
    assert len(kept) == 2
    assert kept.found(prompt, 0, 40).num_tokens == 0
    assert kept.found(prompt, 3 * SIZE, 40).pieces.block.tolist() == [13, 14]
    assert kept.found(prompt, 4 * SIZE, 40).pieces.rows() == [[16, SIZE, 14, 0, 16]]
    assert kept.found(prompt, 3 * SIZE, 4 * SIZE + 3).pieces.block.tolist() == [13]


def test_in_a_namespace_that_has_drifted_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(min_reused_tokens=4, audit={"fallback": {"policy": "focus"}})
    history(world)
    monkeypatch.setattr(parts_of(world.side).audits, "falls_back", lambda _: True)
    assert in_context(second_turn(world, ONCE)) < len(HISTORY) - len(DOCUMENT)


def test_what_is_computed_behind_it_is_as_deep_as_at_the_turn_before() -> None:
    world = World(min_reused_tokens=4, max_model_len=512)
    history(world)
    tracked = world.add([5, *HISTORY, *range(30, 36)], ONCE | RATIO)  # computed behind depth 1
    world.run(tracked)
    assert world.plans[0].donor_depth == 1
    world.run(world.add([5, *HISTORY, *range(30, 40)], ONCE | RATIO))
    assert in_context(world.plans[0]) > len(HISTORY)
    assert world.plans[0].donor_depth == 1


def test_a_policy_that_reuses_what_is_exact_only_ignores_it() -> None:
    exact = ONCE | {"segreuse_policy": "exact"}
    world = World(min_reused_tokens=4)
    request = world.add(NEXT, exact)
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    assert tracked.method.finder.is_exact
    assert not isinstance(tracked.method.finder, ContinuingFinder)


def test_an_error_ends_reuse_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(min_reused_tokens=4)
    world.run(world.add(DOCUMENT, ONCE))
    kept = parts_of(world.side).conversations
    monkeypatch.setattr(kept, "_keep", lambda *_: 1 / 0)
    world.run(world.add(HISTORY, ONCE | RATIO))
    assert parts_of(world.side).health.broken
    assert second_turn(world, ONCE) is None


def test_what_is_computed_although_it_was_found_is_explained() -> None:
    """By a budget of its own, `focus` computes all of so little, and the question twice."""
    world = World(min_reused_tokens=4, max_model_len=1024)
    other = [*range(300, 332)]
    world.run(world.add(other, ONCE))
    history(world)
    request = world.add([*HISTORY, *other, 1, 2, 3], ONCE | {"segreuse_explain": True})
    world.run(request)
    assert in_context(world.plans[0]) == world.plans[0].num_reused == len(HISTORY)
    assert world.plans[0].left_out == len(other)
    assert computed_by(world.side.parts, world.plans[0], RequestOptions(policy="shift")) is None
    first, found, *_ = world.report(request)["explain"]
    assert first["in_context"]
    assert found["reason"] == "not_worth_it"
    assert found["start"] == len(HISTORY)
    asked = world.add([*HISTORY, *other, 4, 5, 6], ONCE | {"segreuse_recompute_ratio": 0.5})
    world.run(asked)
    assert world.plans[0].num_reused == len(HISTORY) + len(other), "a share is taken as it is"


def test_nothing_is_left_out_of_what_a_pass_cannot_compute() -> None:
    """Kept tokens of a named document, computed as a text, would be those of another."""
    world = World(min_reused_tokens=4)
    for options, may in ((ONCE, True), (ONCE | {"segreuse_documents": ["kb/doc"]}, False)):
        tracked = parts_of(world.side).planner.get(world.add(NEXT, options).request_id)
        assert tracked is not None
        continues = isinstance(tracked.method.finder, ContinuingFinder)
        assert (tracked.method.work is not None) == continues == may


def test_what_was_found_behind_it_is_not_searched_for_again() -> None:
    """Nor is what was found together the answer to a search behind it: the prefix cache may have
    what stands in front by then."""
    searches = []
    prompt = Prompt(0, np.arange(40, dtype=np.int32))
    front, back = (
        Matches.of(Pieces.from_table([[first, 8, first, 0, first]])) for first in (0, 16)
    )

    def find(prompt: Prompt, start: int, stop: int) -> Matches:
        searches.append(start)
        prompt.memo = Memo((start, stop, 3), back)
        return back

    def remembered(prompt: Prompt, start: int, stop: int) -> Matches | None:
        memo = prompt.memo
        return memo.matches if memo is not None and memo.key == (start, stop, 3) else None

    kept = SimpleNamespace(found=lambda prompt, start, stop: NOTHING if start else front)
    finder: Any = SimpleNamespace(find=find, remembered=remembered)
    continuing = ContinuingFinder(finder, kept)  # type: ignore[arg-type]
    for _ in range(2):
        assert continuing.remembered(prompt, 0, 39) is None
        both = continuing.find(prompt, 0, 39)
        assert both.pieces.destination.tolist() == [0, 16]
    assert searches == [8]
    assert continuing.remembered(prompt, 8, 39) is back
    assert continuing.remembered(prompt, 16, 39) is None
