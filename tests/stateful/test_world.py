# SPDX-License-Identifier: Apache-2.0
"""What the models found, once more and by hand."""

from typing import Any

import pytest
from vllm.v1.request import Request

from segreuse_extras.trained.cold_documents import ATTEMPTS
from tests.stateful import isolated
from tests.stateful.world import DOCUMENTS, SIZE, Ask, Setup, World
from vllm_segreuse.plan import FreezeOrder


def test_a_request_preempted_in_the_step_that_scheduled_it_leaves_no_names() -> None:
    """vLLM names its blocks as it schedules it; nobody will compute them."""
    world = World(
        Setup(12, priority=True, max_step_tokens=16, long_prompt_tokens=8, whole_prompts=False)
    )
    long = world.add(Ask(tokens=[*range(100, 136)], priority=2))
    world.step()
    urgent = world.add(Ask(tokens=[5, 6, 7, 8], max_tokens=12, seed=1))
    world.step()
    assert not urgent.is_finished()  # it needs a block for its next token
    assert (long.num_computed_tokens, urgent.num_computed_tokens) == (24, 4)
    world.hold(world.pool.get_num_free_blocks() - 2)  # what the long one takes
    world.step()
    assert long.status.name == "PREEMPTED"
    world.check()
    world.drain()


def _frozen_world(**options: Any) -> World:
    """Of 39 blocks, 4 hold a frozen document."""
    world = World(Setup(40, max_step_tokens=64, max_running=3, **options))
    tokens = [2, *DOCUMENTS[0][:15]]
    world.add(Ask(tokens=tokens, keys=("a",), max_tokens=1, freeze=FreezeOrder("doc", 0, 1, 1)))
    world.step()
    assert world.side.call("frozen")["warm"] == {"doc": [4, 0]}
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
    assert world.side.call("frozen")["given_back"] == 1
    world.drain()


def test_23_no_frozen_block_goes_for_a_request_that_has_to_wait_anyway() -> None:
    world = _frozen_world(frozen_pressure=1.0)  # all blocks may be in use
    world.hold(world.pool.get_num_free_blocks() - 4)
    world.add(Ask(tokens=[*range(100, 160)], max_tokens=1))
    world.step()
    assert world.side.call("frozen")["given_back"] == 0
    world.drain()


def test_21_a_reader_is_waited_for() -> None:
    world = _frozen_world()
    world.add(Ask(tokens=[2, *DOCUMENTS[0][:15], *range(90, 99)], keys=("a",), max_tokens=9))
    world.step()
    assert world.side.call("frozen")["warm"]["doc"][1] >= 1, "its prefix is frozen"
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


def test_a_question_behind_a_spread_plan_has_its_slots_and_is_not_computed() -> None:
    """It runs once the plan is done, although no block is free."""
    world = World(Setup(40, spread_tokens=1, drafts=3))
    world.add(Ask(tokens=list(DOCUMENTS[0]), keys=("a",), max_tokens=1))
    world.sessions.begin([40, 41], None, answer=1)  # it holds blocks for the rest of the test
    world.step()
    world.step()
    options: dict[str, Any] = {"segreuse_policy": "focus", "segreuse_min_reused_tokens": 4}
    options["segreuse_recompute_ratio"] = 0.3
    tokens = [90, 91, *DOCUMENTS[0], *range(92, 98)]
    request = world.add(Ask(tokens=tokens, keys=("a",), options=options))
    for _ in range(9):
        if request.request_id in world.scheduler.finished_recving_kv_req_ids:
            break
        world.step()
    assert request.num_computed_tokens == 2 + len(DOCUMENTS[0])
    world.hold(world.pool.get_num_free_blocks())
    world.schedule()
    assert (request.status.name, request.num_computed_tokens) == ("RUNNING", len(tokens))
    world.check()
    world.drain()


# Documents computed alone.

PROMPT = isolated.prompt(before=2, documents=[0], behind=1)


def test_a_document_of_who_has_left_is_nobody_elses() -> None:
    """It is ordered in a step, and added when that step is over."""
    world = World(Setup(in_flight=2, isolated=True))
    mine = world.add(Ask(tokens=[5, *PROMPT], keys=("a",), lora=True))
    world.schedule()
    world.abort(mine)
    other = world.add(Ask(tokens=[6, *PROMPT], keys=("b",)))
    world.drain()
    assert other.status.name.startswith("FINISHED")
    assert world.counts["segreuse-document"] == 2
    assert world.counts["policy: link"] == 1


def test_a_document_is_shared_by_those_who_wait_for_it_at_once() -> None:
    world = World(Setup(isolated=True))
    for first in (5, 6):
        world.add(Ask(tokens=[first, *PROMPT], keys=("a",), salt="salt", lora=True))
    world.drain()
    assert world.counts["segreuse-document"] == 1
    assert world.counts["policy: link"] == 2


@pytest.mark.parametrize(("salt", "lora"), [("salt", False), (None, True)])
def test_a_document_is_computed_as_its_request_would(salt: str | None, lora: bool) -> None:
    """What a salt or an adapter separates is checked wherever KV is copied."""
    world = World(Setup(isolated=True))
    world.add(Ask(tokens=PROMPT, keys=("a",), salt=salt, lora=lora))
    world.drain()
    assert world.counts["policy: link"] == 1


@pytest.mark.parametrize("behind", [1, 9])
def test_what_ends_with_an_error_computes_no_document_in_its_place(behind: int) -> None:
    """vLLM runs a request for log probabilities of its prompt without asking for reuse, and another
    with the same prompt would find it in the prefix cache."""
    world = World(Setup(isolated=True))
    prompt = isolated.prompt(before=2, documents=[0], behind=behind)
    refused = world.add(Ask(tokens=prompt, keys=("a",), prompt_logprobs=True))
    world.step()
    assert refused.status.name == "FINISHED_ERROR"
    served = world.add(Ask(tokens=prompt, keys=("a",)))
    world.drain()
    assert served.status.name.startswith("FINISHED")
    assert world.counts["policy: link"] == 1


def test_a_prompt_that_comes_in_parts_is_refused() -> None:
    """A document of a later part would be computed in its place."""
    world = World(Setup(isolated=True, sessions=True))
    world.sessions.begin([5, 5, 5], ("a",), answer=1)
    world.step()
    assert not world.sessions.open
    assert world.counts["errors"] == 1
    world.drain()


def test_any_number_of_resets_is_survived_by_who_waits_for_a_document() -> None:
    world = World(Setup(isolated=True))
    waits = world.add(Ask(tokens=PROMPT, keys=("a",), max_tokens=1))
    for _ in range(2 * ATTEMPTS):
        world.step()
        world.reset(preempt=True)
    world.drain()
    assert waits.status.name == "FINISHED_LENGTH_CAPPED"


def test_what_nobody_can_find_is_not_indexed() -> None:
    """A request without keys has a namespace of its own, and leaves nothing there."""
    world = World(Setup(isolated=True))
    world.add(Ask(tokens=PROMPT))
    world.drain()
    assert world.counts["policy: link"] == 1
    assert len(world.index) == 0


@pytest.mark.parametrize(("watermark", "errors"), [(0.0, 0), (0.2, 1)])
def test_documents_that_do_not_fit_beside_the_watermark_are_not_begun(
    watermark: float, errors: int
) -> None:
    prompt = isolated.prompt(before=2, documents=[3, 0], behind=1)
    world = World(Setup(14, isolated=True, watermark=watermark))
    world.add(Ask(tokens=prompt, keys=("a",), max_tokens=1))
    world.drain()
    assert world.counts["errors"] == errors
    assert world.counts["segreuse-document"] == (0 if errors else 2)


def test_blocks_that_are_held_for_who_waits_keep_nobody_waiting_for_ever() -> None:
    """One document is there, and held; the other is behind a request that has no room beside it."""
    world = World(Setup(18, isolated=True))
    world.add(Ask(tokens=isolated.prompt(0, [3], 1), keys=("a",), max_tokens=1))
    world.drain()
    waits = world.add(Ask(tokens=isolated.prompt(2, [3, 0], 1), keys=("a",), max_tokens=1))
    world.schedule()
    large = world.add(Ask(tokens=[*range(200, 260)], max_tokens=1))
    world.drain()
    assert {waits.status.name, large.status.name} == {"FINISHED_LENGTH_CAPPED"}


# Equal prompts.


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_equal_prompts_share_a_plan_however_short_their_answers_are(
    in_flight: int, max_tokens: int
) -> None:
    world = World(Setup(60, in_flight=in_flight))
    world.reports = {}
    world.add(Ask(tokens=list(DOCUMENTS[0]), keys=("a",), max_tokens=1))
    world.drain()
    options = {"segreuse_policy": "epic", "segreuse_min_reused_tokens": 4}
    tokens = [90, 91, 92, *DOCUMENTS[0], 93]
    asks = [
        Ask(tokens=tokens, keys=("a",), options=options, max_tokens=max_tokens, seed=n)
        for n in (1, 2, 3, 4)
    ]
    first, *others = [world.add(ask).request_id for ask in asks]
    world.drain()
    assert world.reports[first]["recomputed_tokens"] > 0
    for name in others:
        report = world.reports[name]
        assert report["recomputed_tokens"] == 0
        assert report["new_tokens"] <= SIZE


# Streaming sessions.


def _with_a_part() -> tuple[World, str]:
    """A session that has answered once, and whose next part has arrived."""
    world = World(Setup(sessions=True))
    world.sessions.begin([*range(10, 19)], ("a",), answer=1)
    (session,) = world.sessions.open
    world.step()
    world.sessions.go_on(session, [30, 31], 1, longest=60)
    return world, session.name


@pytest.mark.parametrize("preempted", [False, True])
def test_a_session_that_is_called_back_is_new_to_the_workers(preempted: bool) -> None:
    """They have not heard of its next part."""
    world, name = _with_a_part()
    request = world.scheduler.requests[name]
    request.num_preemptions += preempted  # when it computed an earlier part
    assert request.num_computed_tokens
    assert world.reset(preempt=True)
    assert (request.status.name, request.num_computed_tokens) == ("WAITING", 0)
    for _ in range(3):
        world.step()
        world.check()
    assert request.num_computed_tokens
    world.drain()


def test_no_plan_is_called_back_for_a_reset_that_vllm_refuses() -> None:
    world = World(Setup(40, in_flight=2, spread_tokens=1))
    world.add(Ask(tokens=list(DOCUMENTS[0]), keys=("a",), max_tokens=1))
    world.sessions.begin([40, 41], None, answer=1)
    for seed in range(4):  # some of whom have not met the token that ends them
        world.add(Ask(tokens=[*range(200, 205)], max_tokens=40, seed=seed))
    for _ in range(4):
        world.step()
    options = {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 4}
    tokens = [90, 91, 92, *DOCUMENTS[0], 93]
    request = world.add(Ask(tokens=tokens, keys=("a",), options=options))
    world.schedule()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    world.reset(preempt=True)
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert world.counts["resets in vain"] == 1
    world.check()
    world.drain()


@pytest.mark.parametrize("kind", ["heal_tokens", "audits"])
def test_a_session_that_waits_for_its_client_needs_nothing_of_the_engine(kind: str) -> None:
    """What an engine does in idle time is done, and then it need not step."""
    world = World(Setup(60, **{kind: 8}))
    world.sessions.begin([40, 41], None, answer=1)
    options = {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 4}
    for tokens in (DOCUMENTS[0], [90, 91, 92, 93, *DOCUMENTS[0], 94]):
        request = world.add(Ask(tokens=list(tokens), keys=("a",), options=options))
        while not request.is_finished():
            world.step()
    for _ in range(20):
        world.step()
        world.check()
    assert [it.status.name for it in world.live] == ["WAITING_FOR_STREAMING_REQ"]
    assert not world.side.has_pending_work
    done = {"heal_tokens": "segreuse-heal", "audits": "segreuse-audit"}[kind]
    assert world.counts[done] > 0
    world.drain()
