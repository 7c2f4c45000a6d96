# SPDX-License-Identifier: Apache-2.0
"""vLLM's allocation gets frozen blocks before a request has to wait: enough, and no more."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from tests.compat.managed import LIMIT, OPTIONS, SIZE, Managed, manager_of, plan_of
from vllm_segreuse.compat import kv_cache_manager
from vllm_segreuse.compat.kv_cache_manager import has_running_requests
from vllm_segreuse.scheduling.tracked import LeftBehind


@pytest.fixture
def managed() -> Managed:
    """Two frozen documents of three blocks each, and two free blocks."""
    made = Managed()
    made.freeze("old", 3)
    made.freeze("new", 3)
    made.hold_all_but(2)
    return made


def test_a_request_that_fits_leaves_what_is_frozen(managed: Managed) -> None:
    request = managed.request([*range(2 * SIZE)])
    assert managed.manager.allocate_slots(request, 2 * SIZE) is not None
    assert managed.warm == {"old", "new"}


def test_a_request_that_does_not_fit_gets_what_was_used_longest_ago(managed: Managed) -> None:
    request = managed.request([*range(5 * SIZE)])
    assert managed.manager.allocate_slots(request, 5 * SIZE) is not None
    assert managed.warm == {"new"}
    assert managed.pool.num_free_blocks() == 0


def test_one_block_more_takes_the_other_document_too(managed: Managed) -> None:
    request = managed.request([*range(5 * SIZE + 1)])
    assert managed.manager.allocate_slots(request, 5 * SIZE + 1) is not None
    assert managed.warm == set()


def test_a_request_that_cannot_fit_takes_nothing(managed: Managed) -> None:
    request = managed.request([*range(8 * SIZE + 1)])
    assert managed.manager.allocate_slots(request, 8 * SIZE + 1) is None
    assert managed.warm == {"old", "new"}


def test_a_chunk_that_fits_is_not_refused_for_the_rest_of_the_prompt(managed: Managed) -> None:
    request = managed.request([*range(9 * SIZE)])
    assert managed.manager.allocate_slots(request, SIZE) is not None
    assert managed.warm == {"old", "new"}


def test_drafts_need_room_too(managed: Managed) -> None:
    """Two blocks of tokens are free; the slots behind them are a third's."""
    request = managed.request([*range(2 * SIZE)])
    given = managed.manager.allocate_slots(request, 2 * SIZE, num_lookahead_tokens=SIZE)
    assert given is not None
    assert managed.warm == {"new"}


def test_drafts_of_who_is_admitted_need_room_too(managed: Managed) -> None:
    """vLLM names more arguments for these than for requests that run."""
    request = managed.request([*range(2 * SIZE)])
    given = managed.manager.allocate_slots(
        request, 2 * SIZE, num_lookahead_tokens=SIZE, has_scheduled_reqs=False
    )
    assert given is not None
    assert managed.warm == {"new"}


def test_allocation_without_room_for_drafts_is_refused_when_it_is_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocate_slots(self: Any, request: Any, num_new_tokens: int) -> None: ...

    monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate_slots)
    with pytest.raises(RuntimeError, match=r"see the num_lookahead_tokens of .*allocate_slots"):
        kv_cache_manager.install()


def test_drafts_beyond_the_longest_request_need_none() -> None:
    managed = Managed()
    managed.freeze("document", 3)
    managed.hold_all_but(LIMIT // SIZE - 1)
    request = managed.request([*range(LIMIT)])
    given = managed.manager.allocate_slots(request, LIMIT, num_lookahead_tokens=4 * SIZE)
    assert given is not None
    assert managed.warm == set()


def test_a_running_request_keeps_what_it_holds() -> None:
    managed = Managed()
    managed.freeze("old", 3)
    managed.freeze("new", 3)
    managed.hold_all_but(5)
    request = managed.request([*range(5 * SIZE)])
    assert managed.manager.allocate_slots(request, 5 * SIZE)
    request.num_computed_tokens = 5 * SIZE
    request.status = RequestStatus.RUNNING
    assert managed.manager.allocate_slots(request, 1) is not None
    assert managed.warm == {"new"}, "one block was missing"


def test_tokens_that_are_computed_by_then_count(managed: Managed) -> None:
    """Of a running request vLLM schedules more tokens than it knows: drafts."""
    request = managed.request([*range(2 * SIZE)])
    assert managed.manager.allocate_slots(request, 2 * SIZE)
    request.num_computed_tokens = 2 * SIZE
    request.status = RequestStatus.RUNNING
    assert managed.manager.allocate_slots(request, 3 * SIZE + 1) is not None
    assert managed.warm == set(), "four blocks were missing"


@pytest.mark.parametrize("shared", [True, False])
def test_a_prefix_needs_no_block_if_somebody_holds_it(shared: bool) -> None:
    managed = Managed()
    prefix = [*range(100, 100 + 2 * SIZE)]
    held = managed.computed(prefix)
    if shared:
        managed.pool.touch(held)
    managed.freeze("old", 3)
    managed.freeze("new", 3)
    managed.hold_all_but(2 if shared else 5)  # with the two that nobody holds
    request = managed.request([*prefix, *range(5 * SIZE)])
    found, hit = managed.manager.get_computed_blocks(request)[:2]
    assert hit == 2 * SIZE
    given = managed.manager.allocate_slots(request, 5 * SIZE, hit, found)
    assert given is not None
    assert managed.warm == {"new"}


def test_a_prefix_hit_goes_on_with_what_an_earlier_turn_has_left() -> None:
    managed = Managed()
    prefix = [*range(100, 100 + 2 * SIZE)]
    exact, left = managed.computed(prefix), managed.computed([*range(5 * SIZE)])[2:]
    request = managed.request([*prefix, *range(4 * SIZE)])
    asked = []

    def found(prompt: Any, start: int, stop: int) -> LeftBehind:
        asked.append((start, stop))
        return LeftBehind(start, start + 3 * SIZE, [block.block_id for block in left], 0)

    tracked = managed.tracked(request)
    tracked.method = replace(tracked.method, left_behind=(found,))
    blocks, hit, _ = managed.manager.get_computed_blocks(request)
    assert hit == 5 * SIZE
    assert blocks.blocks == ([*exact, *left],)
    assert asked == [(2 * SIZE, 6 * SIZE - 1)], "all but the last token"
    assert managed.manager.allocate_slots(request, SIZE, hit, blocks) is not None
    assert [block.ref_cnt for block in left] == [1, 1, 1]
    assert managed.pool.resident_blocks(request, 0, 6).tolist() == [
        *(block.block_id for block in exact),
        *(-1, -1, -1, -1),
    ], "none of them has an exact name, nor what is computed behind"


def test_without_an_earlier_turn_a_prefix_hit_is_vllms_own() -> None:
    managed = Managed()
    exact = managed.computed([*range(100, 100 + 2 * SIZE)])
    for options in (None, OPTIONS):
        request = managed.request([*range(100, 100 + 3 * SIZE)], options)
        blocks, hit, _ = managed.manager.get_computed_blocks(request)
        assert (blocks.blocks, hit) == ((exact,), 2 * SIZE)


def test_what_vllm_keeps_free_for_those_who_run_is_kept() -> None:
    managed = Managed(50, watermark=0.04)
    assert managed.manager.watermark_blocks == 2
    managed.freeze("old", 3)
    managed.freeze("new", 3)
    managed.hold_all_but(2)
    request = managed.request([*range(4 * SIZE)])
    assert managed.manager.allocate_slots(request, 4 * SIZE, has_scheduled_reqs=True) is not None
    assert managed.pool.num_free_blocks() >= 2
    assert managed.warm == set()


def test_blocks_that_are_promised_to_others_are_left_to_them(managed: Managed) -> None:
    """To those whose prompts are under way, while a spread plan asks for its blocks."""
    request = managed.request([*range(4 * SIZE)])
    assert managed.manager.allocate_slots(request, 4 * SIZE, reserved_blocks=2) is not None
    assert managed.pool.num_free_blocks() >= 2
    assert managed.warm == set()


def test_a_step_that_admits_nobody_more_takes_nothing(managed: Managed) -> None:
    managed.planner.budget.close()
    request = managed.request([*range(5 * SIZE)])
    assert managed.manager.allocate_slots(request, 5 * SIZE) is None
    assert managed.warm == {"old", "new"}


def test_the_managers_of_other_engines_are_left_alone(managed: Managed) -> None:
    other = manager_of(3)
    request = managed.request([*range(5 * SIZE)], options=None)
    assert other.allocate_slots(request, 5 * SIZE) is None
    assert other.allocate_slots(request, 2 * SIZE) is not None


def test_somebody_is_admitted_while_it_holds_blocks(managed: Managed) -> None:
    manager = managed.manager
    assert not has_running_requests(manager)
    request = managed.request([*range(SIZE)])
    manager.allocate_slots(request, SIZE)
    assert has_running_requests(manager)
    manager.free(request)
    assert not has_running_requests(manager)


def asking(managed: Managed, slots: int) -> Request:
    """A request whose plan reads a question up to there; two blocks in front of it are planned."""
    request = managed.request([*range(slots)])
    plan = plan_of(request, 0)
    ids = plan.token_ids
    recipe = plan.recipe.up_to(2 * SIZE)
    managed.tracked(request).plan = replace(
        plan, stop=2 * SIZE, token_ids=ids[: 2 * SIZE], suffix=ids[2 * SIZE :], recipe=recipe
    )
    return request


@pytest.mark.parametrize(("new", "is_spread"), [(0, True), (1, False), (3 * SIZE, False)])
@pytest.mark.parametrize("drafts", [0, SIZE, 4 * SIZE])
def test_a_pass_has_slots_for_a_question_that_vllm_computes_later(
    new: int, is_spread: bool, drafts: int
) -> None:
    """In steps to come, or once a spread plan is done; with drafts, more may be scheduled."""
    managed = Managed()
    request = asking(managed, 5 * SIZE)
    given = managed.manager.allocate_slots(
        request,
        new,
        num_external_computed_tokens=2 * SIZE,
        num_lookahead_tokens=drafts,
        delay_cache_blocks=is_spread,
    )
    assert given is not None
    least = -(-(2 * SIZE + new + drafts) // SIZE)
    held = managed.manager.get_block_ids(request.request_id)[0]
    assert len(held) == max(5, least)
    named = [block for block in held if managed.pool.name_of(block) is not None]
    assert named == ([] if is_spread else held[: 2 + new // SIZE]), "and no block is named early"


def test_a_question_needs_no_more_room_than_its_prompt(managed: Managed) -> None:
    request = asking(managed, 5 * SIZE)
    given = managed.manager.allocate_slots(request, 1, num_external_computed_tokens=2 * SIZE)
    assert given is not None
    assert managed.warm == {"new"}


def test_installing_twice_wraps_once() -> None:
    kv_cache_manager.install()
    once = KVCacheManager.allocate_slots
    kv_cache_manager.install()
    assert KVCacheManager.allocate_slots is once


@pytest.mark.parametrize("state", ["alone", "others run", "without a plan", "closed"])
def test_who_alone_misses_room_does_without_its_plan(state: str) -> None:
    managed = Managed()
    others = managed.request([*range(2 * SIZE)], options=None)
    if state == "others run":
        assert managed.manager.allocate_slots(others, 2 * SIZE) is not None
    managed.hold_all_but(1)  # as donors do
    request = managed.request([*range(100, 100 + 2 * SIZE)])
    tracked = managed.tracked(request)
    tracked.plan = None if state == "without a plan" else plan_of(request, 0)
    if state == "closed":
        managed.planner.budget.close()
    given = managed.manager.allocate_slots(request, 1, num_external_computed_tokens=2 * SIZE - 1)
    assert given is None
    assert (tracked.allocation_failed > 0) is (state == "alone")
