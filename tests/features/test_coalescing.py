# SPDX-License-Identifier: Apache-2.0
"""Equal prompts at once: one is carried out, and the others take its KV as it is."""

from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.parts import parts_of
from tests.reports import Whole
from tests.test_scheduler import DOCUMENT, OPTIONS, PROMPT, SIZE, World
from vllm_segreuse.plan import Fixed

FOCUS = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.25}
WHOLE = len(PROMPT) // SIZE


class Engine(World):
    """Requests go on until they are ended."""

    def begin(self, request: Request) -> int | None:
        """What vLLM does with a request that waits; None: it goes on waiting."""
        name, last = request.request_id, request.num_tokens - 1
        taken = self.pool.left_behind(name, 0, last)
        supplied, _ = self.side.match(request, len(taken) * SIZE)
        if supplied is None:
            return None
        full = request.num_tokens // SIZE
        self.pool.touch(taken)
        blocks = [*taken, *self.pool.get_new_blocks(full + 1 - len(taken))]
        self.pool.cache_full_blocks(request, blocks, len(taken), full, SIZE, 0)
        self.held[name] = [block.block_id for block in blocks]
        self.side.allocated(request, self.held[name])
        request.status = RequestStatus.RUNNING
        self.taken = len(taken) * SIZE
        return supplied

    def step(self, *began: Request) -> list[Any]:
        """The end of a scheduling step: what was given to these is computed. Returns the plans."""
        plans = self.side.take_step(True).plans
        for request in began:
            request.num_computed_tokens = request.num_tokens
        return list(plans)

    def end(self, request: Request, status: Any = RequestStatus.FINISHED_STOPPED) -> Any:
        """Its blocks may be given to others."""
        blocks = self.held.pop(request.request_id)
        request.status = status
        report = self.side.finished(request, blocks)
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])
        return Whole(report or {})


def engine(**options: Any) -> Engine:
    """A document is cached."""
    world = Engine(min_reused_tokens=4, **options)
    world.run(world.add(DOCUMENT))
    return world


def first_of(world: Engine, others: int, options: Any = FOCUS, **fields: Any) -> list[Request]:
    """Equal prompts, of which the first one is computed in this step."""
    requests = [world.add(PROMPT, options, **fields) for _ in range(1 + others)]
    assert world.begin(requests[0]) is not None
    return requests


def test_the_others_take_the_blocks_of_the_first_and_compute_one_token_each() -> None:
    world = engine()
    first, *others = first_of(world, others=3)
    assert [world.begin(request) for request in others] == [None] * 3, "it is computed just now"
    (plan,) = world.step(first)
    assert plan.num_recomputed > 0
    for request in others:
        assert world.begin(request) == len(PROMPT) - 1 - WHOLE * SIZE
        mine, its = world.held[request.request_id], world.held[first.request_id]
        assert mine[:WHOLE] == its[:WHOLE]
        assert mine[WHOLE] != its[WHOLE], "each goes on to fill its own"
    plans = world.step(*others)
    for plan in plans:
        assert plan.pieces.rows() == [
            [WHOLE * SIZE, 1, world.held[first.request_id][WHOLE], 0, WHOLE * SIZE]
        ]
        assert plan.recipe.program == Fixed()
        assert plan.active_tokens == 0
        assert not plan.pieces.turn.any()
    for request in others:
        report = world.end(request)
        assert (report["reused_tokens"], report["recomputed_tokens"]) == (len(PROMPT) - 1, 0)
        assert (report["new_tokens"], report["bypass_reason"]) == (1, None)
        assert report["policy"] == "focus"


@pytest.mark.parametrize("behind", range(SIZE))
def test_however_much_of_the_last_block_is_full(behind: int) -> None:
    world = engine()
    prompt = [7, *DOCUMENT, *range(8, 8 + 3 + behind)]
    first, other = (world.add(prompt, FOCUS) for _ in range(2))
    assert world.begin(first) is not None
    world.step(first)
    last = (len(prompt) - 1) // SIZE * SIZE
    assert world.begin(other) == len(prompt) - 1 - last
    assert world.taken == last
    assert len(world.step(other)) == (len(prompt) - 1 > last)


@pytest.mark.parametrize(
    ("prompt", "options", "fields"),
    [
        ([7, *DOCUMENT, 9], FOCUS, {}),
        ([6, *DOCUMENT, 8], FOCUS, {}),
        (PROMPT, FOCUS | {"extra_keys": "others"}, {}),
        (PROMPT, FOCUS | {"segreuse_recompute_ratio": 0.5}, {}),
        (PROMPT, FOCUS, {"cache_salt": "other"}),
    ],
    ids=["the last token", "the first token", "namespace", "options", "salt"],
)
def test_others_than_equal_ones_neither_wait_nor_take_anything(
    prompt: list[int], options: Any, fields: dict[str, Any]
) -> None:
    world = engine()
    (first,) = first_of(world, others=0)
    same_step, later = (world.add(prompt, options, **fields) for _ in range(2))
    assert world.begin(same_step) is not None
    world.end(same_step)
    world.step(first)
    assert world.begin(later) is not None
    assert world.taken == 0


def test_what_an_exact_prompt_holds_is_left_to_vllms_prefix_cache() -> None:
    world = Engine(min_reused_tokens=4)
    first, other = first_of(world, others=1)
    assert world.begin(other) is not None
    assert world.step(first, other) == []


@pytest.mark.parametrize("how", ["aborted", "aborted later", "preempted", "called back"])
def test_nothing_is_taken_of_who_holds_its_blocks_no_more(how: str) -> None:
    world = engine()
    first, other = first_of(world, others=1)
    assert world.begin(other) is None
    world.step(*[first] * (how == "aborted later"))
    if how == "preempted":
        first.status, first.num_computed_tokens = RequestStatus.PREEMPTED, 0
    elif how == "called back":
        world.side.call_back(first)
    else:
        world.end(first, RequestStatus.FINISHED_ABORTED)
    assert world.begin(other) is not None
    assert world.taken == 0
    (plan,) = world.step(other)
    assert plan.num_recomputed > 0, "it does its own work"


def test_those_that_wait_take_whole_blocks_of_one_that_has_ended_in_that_step() -> None:
    """As one does that answers with a single token."""
    world = engine()
    first, *others = first_of(world, others=2)
    assert [world.begin(request) for request in others] == [None] * 2
    blocks = world.held[first.request_id][:WHOLE]
    world.step(first)
    world.end(first)
    late = world.add(PROMPT, FOCUS)
    requests = parts_of(world.side).core.requests
    for request in others:
        assert world.begin(request) == 0
        assert world.held[request.request_id][:WHOLE] == blocks
        assert requests[request.request_id].donor_depth == 0
        assert requests[request.request_id].exact_ends[1] == 0
    assert world.begin(late) is None, "it has not waited for the first one"
    assert world.step(*others) == []
    for request in others:
        report = world.end(request)
        assert (report["reused_tokens"], report["new_tokens"]) == (WHOLE * SIZE, 2)
    assert world.begin(late) is not None


@pytest.mark.parametrize("how", ["evicted", "reset", "too late"])
def test_blocks_of_one_that_has_ended_are_no_longer_there_one_day(how: str) -> None:
    world = engine()
    first, other = first_of(world, others=1)
    assert how == "too late" or world.begin(other) is None
    world.step(first)
    last = world.held[first.request_id][WHOLE - 1]
    world.end(first)
    if how == "evicted":
        world.pool.evict_blocks({last})
    elif how == "reset":
        assert world.pool.reset_prefix_cache()
        world.run(world.add(DOCUMENT))
    assert world.begin(other) is not None
    assert world.taken == 0


def test_a_plan_that_takes_several_steps_is_waited_for() -> None:
    """vLLM counts its tokens as computed from the first of them on."""
    world = engine()
    first, other = first_of(world, others=1)
    world.step(first)
    first.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert world.begin(other) is None
    first.status = RequestStatus.RUNNING
    assert world.begin(other) is not None


def test_the_next_holder_takes_the_place_of_one_that_has_ended() -> None:
    world = engine()
    first, second, third = first_of(world, others=2)
    world.step(first)
    world.begin(second)
    world.step(second)
    world.end(first)
    assert world.begin(third) == len(PROMPT) - 1 - WHOLE * SIZE
    assert world.held[third.request_id][:WHOLE] == world.held[second.request_id][:WHOLE]
    (plan,) = world.step(third)
    assert plan.donor_blocks == world.held[second.request_id][WHOLE:]


def test_what_is_taken_is_not_waited_for_once_more() -> None:
    """Or the sequences of a request would begin one by one."""
    world = engine()
    first, *others = first_of(world, others=3)
    world.step(first)
    assert None not in [world.begin(request) for request in others]


def test_who_waits_is_not_given_an_exact_name_or_a_better_depth() -> None:
    world = engine()
    first, other = first_of(world, others=1)
    world.step(first)
    world.begin(other)
    world.step(other)
    requests = parts_of(world.side).core.requests
    depths = [requests[it.request_id].donor_depth for it in (first, other)]
    assert depths == [0, 0]
    assert requests[other.request_id].exact_ends[1] == 0
    assert (world.pool.resident_blocks(other, 0, WHOLE) < 0).all()


def test_who_was_preempted_with_an_answer_computes_that_itself() -> None:
    world = engine()
    first, other = first_of(world, others=1)
    world.step(first)
    other.append_output_token_ids([3, 4])
    assert world.begin(other) is not None
    assert world.taken == 0


def test_who_reuses_nothing_any_more_does_not_wait() -> None:
    world = engine()
    _, other = first_of(world, others=1)
    parts_of(world.side).planner.give_up(other.request_id)
    assert world.begin(other) == 0
    assert world.taken == 0


def test_who_was_too_early_once_does_not_wait_for_one_that_has_ended() -> None:
    """Admission closes between the lookup of a prefix and the question who waits."""
    world = engine()
    first, other = first_of(world, others=1)
    world.pool.left_behind(other.request_id, 0, other.num_tokens - 1)
    world.step(first)
    world.side.set_enabled(False)  # nobody is asked any more
    assert world.begin(other) == 0


@pytest.mark.parametrize("least", [len(DOCUMENT), len(DOCUMENT) + 2])
def test_whole_blocks_may_hold_fewer_tokens_than_are_worth_reuse(least: int) -> None:
    """What the first one reuses is more than that, and the others take all of it."""
    world, document = Engine(), [*DOCUMENT, 1, 2, 3, 4]
    world.run(world.add(document))
    options = FOCUS | {"segreuse_min_reused_tokens": least}
    prompt = [7, *document[: len(DOCUMENT) + 2], 8]
    first, other = (world.add(prompt, options) for _ in range(2))
    assert world.begin(first) == 1 + len(DOCUMENT) + 2
    world.step(first)
    assert world.begin(other) == 3
    assert world.taken == len(DOCUMENT)


def test_a_part_of_a_block_may_be_all_that_is_taken() -> None:
    """The prefix hit of the others reaches into the first one's last block."""
    world = engine()
    first, other = first_of(world, others=1)
    world.step(first)
    last, name = len(PROMPT) - 1, other.request_id
    start = last // SIZE * SIZE
    assert [*world.pool.left_behind(name, start, last)] == []
    assert world.match(other, start) == last - start


@pytest.mark.parametrize("switch", [False, "observe"])
def test_with_the_switch_off_nobody_takes_anything(switch: Any) -> None:
    world = engine()
    first, at_once, later = first_of(world, others=2)
    world.side.set_enabled(switch)
    assert world.begin(at_once) == 0, "nor waits for what it would not take"
    world.step(first)
    assert world.begin(later) == 0
    assert world.taken == 0


def test_of_equal_prompts_the_first_one_is_audited() -> None:
    """It was planned. The others have the same KV, and a plan for a part of a block."""
    world = engine(audit={"share": 1.0, "per_minute": 6000})
    audits = parts_of(world.side).audits
    first, other = first_of(world, others=1)
    assert list(audits.take_orders().record) == [first.request_id]
    world.step(first)
    assert world.begin(other)
    assert not audits.has_orders
    assert world.step(other)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    world = engine()
    coalescing = parts_of(world.side).feature["coalescing"]
    before = coalescing.num_known
    requests = first_of(world, others=2)
    world.step(requests[0])
    for request in requests[1:]:
        world.begin(request)
    world.step(*requests[1:])
    for request in requests:
        world.end(request)
    assert coalescing.num_known == before
