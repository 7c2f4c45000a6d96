# SPDX-License-Identifier: Apache-2.0
"""What workers report reaches the scheduler's half first, and only loads that vLLM waits for count;
a reset takes the blocks of whoever is set aside; references are added when a step is over; a
session goes on behind what its answer keeps. Other connectors see no change."""

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_segreuse.compat.scheduler import (
    _handle_stopped_request,
    _reset_prefix_cache,
    _update_from_output,
)


def output(computed: Any, loaded: set[str] | None = None) -> SimpleNamespace:
    metadata = None
    if computed is not None:
        metadata = SimpleNamespace(outcomes=computed, messages={"tier": "done"})
    reported = SimpleNamespace(kv_connector_worker_meta=metadata, finished_recving=loaded)
    return SimpleNamespace(kv_connector_output=reported)


def request(status: str, computed: int = 8, preemptions: int = 0) -> SimpleNamespace:
    which = RequestStatus[status]
    return SimpleNamespace(
        request_id=status,
        status=which,
        is_finished=lambda: RequestStatus.is_finished(which),
        num_computed_tokens=computed,
        num_preemptions=preemptions,
    )


def connector(**side: Any) -> SimpleNamespace:
    """Ours, with a scheduler's half that does as given."""
    nothing = {
        "reported": lambda messages, outcomes, requests: None,
        "take_requests": lambda running, waiting, is_paused: [],
        "take_failed": list,
        "resetting": list,
        "processed": lambda: None,
        "holds": lambda request_id: False,
    }
    return SimpleNamespace(scheduler_side=SimpleNamespace(**nothing | side))


IDLE = {
    "pause_state": PauseState.UNPAUSED,
    "get_request_counts": lambda: (0, 0),
    "num_waiting_for_streaming_input": 0,
}


def updated(model_runner_output: Any, ours: bool = True) -> list[Any]:
    """What happened, in order."""
    happened: list[Any] = []
    requests: dict[str, Any] = {"request": object()}

    def reported(*given: Any) -> None:
        happened.append(given)
        assert given[2] is requests

    scheduler = SimpleNamespace(
        connector=connector(reported=reported) if ours else object(),
        requests=requests,
        **IDLE,
    )
    wrapped = _update_from_output(lambda *_: happened.append("updated"))
    wrapped(scheduler, None, model_runner_output)
    return [what if isinstance(what, str) else what[:2] for what in happened]


def test_ours_hears_first() -> None:
    assert updated(output({"request": 7})) == [({"tier": "done"}, {"request": 7}), "updated"]


def test_where_nothing_is_reported_nothing_is_passed_on() -> None:
    assert updated(output(None)) == ["updated"]
    assert updated(SimpleNamespace(kv_connector_output=None)) == ["updated"]


def test_other_connectors_are_left_alone() -> None:
    assert updated(output("theirs"), ours=False) == ["updated"]
    happened: list[str] = []
    scheduler = SimpleNamespace(connector=None, requests={})
    _update_from_output(lambda *_: happened.append("updated"))(scheduler, None, output(None))
    assert happened == ["updated"]


@pytest.mark.parametrize("ours", [True, False])
def test_only_loads_that_vllm_waits_for_count(ours: bool) -> None:
    waiting, ended, called_back = (
        request(status) for status in ("WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED", "WAITING")
    )
    requests = {r.request_id: r for r in (waiting, ended, called_back)}
    scheduler = SimpleNamespace(
        connector=connector() if ours else SimpleNamespace(), requests=requests, **IDLE
    )
    reported = output(None, {*requests, "gone"})
    _update_from_output(lambda *_: None)(scheduler, None, reported)
    counted = {"WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED"} if ours else {*requests, "gone"}
    assert reported.kv_connector_output.finished_recving == counted


def stepped(paused: PauseState = PauseState.UNPAUSED, *own: Any) -> list[Any]:
    """What happened in a step, in order."""
    happened: list[Any] = []

    def following(running: int, waiting: int, is_paused: bool) -> Any:
        happened.append((running, waiting, is_paused))
        return own

    side = {"reported": lambda *_: happened.append("reported"), "take_requests": following}
    scheduler = SimpleNamespace(
        connector=connector(**side),
        requests={},
        pause_state=paused,
        get_request_counts=lambda: (3, 3),
        num_waiting_for_streaming_input=2,  # for their clients, not for the engine
        add_request=happened.append,
    )
    wrapped = _update_from_output(lambda *_: happened.append("updated") or "its outputs")
    assert wrapped(scheduler, None, output({})) == "its outputs"
    return happened


def test_requests_of_our_own_are_added_when_a_step_is_over() -> None:
    found = stepped(PauseState.UNPAUSED, "reference", "document")
    assert found == ["reported", "updated", (3, 1, False), "reference", "document"]
    assert stepped()[-1] == (3, 1, False)


def test_requests_that_failed_have_ended_before_their_tokens_count() -> None:
    happened: list[Any] = []
    failed = iter([["in the step"], ["behind it"]])

    def finish(names: list[str], status: RequestStatus) -> list[Any]:
        happened.append((names, status.name))
        reason = SimpleNamespace(get_finished_reason=lambda: FinishReason.ERROR, client_index=2)
        return [SimpleNamespace(request_id=name, **vars(reason)) for name in names]

    side = {"take_failed": lambda: next(failed)}
    scheduler = SimpleNamespace(
        connector=connector(**side), requests={}, finish_requests=finish, **IDLE
    )
    wrapped = _update_from_output(lambda *_: happened.append("updated") or {})
    (found,) = wrapped(scheduler, None, output({})).items()
    ended = "FINISHED_ERROR"
    assert happened == [(["in the step"], ended), "updated", (["behind it"], ended)]
    client, outputs = found
    assert client == 2
    assert [one.request_id for one in outputs.outputs] == ["in the step", "behind it"]
    assert {one.finish_reason for one in outputs.outputs} == {FinishReason.ERROR}


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_features_are_told_that_an_engine_is_paused(state: PauseState) -> None:
    assert stepped(state) == ["reported", "updated", (3, 1, True)]


def test_a_reset_aborts_requests_of_our_own_first() -> None:
    happened: list[Any] = []
    scheduler = SimpleNamespace(
        connector=connector(resetting=lambda: ["reference"]),
        finish_requests=lambda *given: happened.append(given),
    )
    reset = _reset_prefix_cache(lambda self, running: happened.append("reset"))
    reset(scheduler, False)
    assert happened == [(["reference"], RequestStatus.FINISHED_ABORTED), "reset"]


def test_what_a_reference_needs_of_vllms_scheduler_is_there() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as Real

    for name in ("add_request", "finish_requests", "get_request_counts"):
        assert callable(getattr(Real, name))
    assert isinstance(Real.pause_state, property)
    assert "num_waiting_for_streaming_input" in Real.__init__.__code__.co_names


class Scheduler:
    """The parts of vLLM's that a reset goes through, and what happened to them."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.defer_block_free = False
        self.held = [
            request("WAITING_FOR_REMOTE_KVS"),
            request("WAITING_FOR_REMOTE_KVS", preemptions=1),
            request("WAITING"),
            request("WAITING", computed=0),
            request("WAITING", preemptions=1),
        ]
        self.ended = request("FINISHED_ABORTED")
        self.requests = {str(i): r for i, r in enumerate([*self.held, self.ended])}
        self.kv_holding_waiting = self.held
        self.finished_recving_kv_req_ids = {"WAITING"}
        self.deferred_waiting = _Bag()
        self.inflight_prefills = self._inflight_prefills = _Bag()
        self.stages: list[Any] = []
        self.freed: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(free=self.freed.append)

    def _set_kv_fetch_stage(self, request: Any, stage: str | None) -> None:
        assert stage is None
        self.stages.append(request)

    def _free_blocks(self, request: Any) -> None:
        self.freed.append(request)


class _Bag:
    """What was taken out of it; requests are not hashable here."""

    def __init__(self) -> None:
        self.discarded: list[Any] = []

    def discard(self, request: Any) -> None:
        self.discarded.append(request)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_a_reset_of_all_takes_the_blocks_of_who_is_set_aside(ours: bool, running: bool) -> None:
    called: list[Any] = []
    scheduler = Scheduler(connector(call_back=called.append) if ours else SimpleNamespace())
    reset = _reset_prefix_cache(lambda self, running, more=False: ("reset", running, more))
    assert reset(scheduler, running, more=True) == ("reset", running, True)
    if not (ours and running):
        assert scheduler.freed == called == []
        return
    loading, again, loaded, _, session = scheduler.held
    assert called == [loading, again, loaded, session]
    assert scheduler.freed == [scheduler.ended, *called]
    assert [r.status.name for r in called] == ["WAITING", "PREEMPTED", "WAITING", "WAITING"]
    assert [r.num_computed_tokens for r in called] == [0, 0, 0, 0]
    assert not scheduler.finished_recving_kv_req_ids
    assert scheduler.deferred_waiting.discarded == called, "it would be admitted a second time"
    assert scheduler.inflight_prefills.discarded == called, "blocks would be kept for it"
    assert scheduler.stages == called


def test_nobody_is_called_back_for_a_reset_that_fails() -> None:
    """vLLM cannot take the blocks of a session that waits for its next part."""
    called: list[Any] = []
    scheduler = Scheduler(connector(call_back=called.append))
    scheduler.held.append(request("WAITING_FOR_STREAMING_REQ"))
    assert _reset_prefix_cache(lambda self, running: "reset")(scheduler, True) == "reset"
    assert scheduler.freed == called == []
    assert {r.num_computed_tokens for r in scheduler.held} == {0, 8}


@pytest.mark.parametrize("held", ["0", "3", "5"])
def test_nobody_is_called_back_while_another_engine_has_blocks(held: str) -> None:
    """Of a request that waits for them, or has ended."""
    called: list[Any] = []
    side = connector(call_back=called.append, holds=lambda request_id: request_id == held)
    scheduler = Scheduler(side)
    assert _reset_prefix_cache(lambda self, running: "reset")(scheduler, True) == "reset"
    assert scheduler.freed == called == []


def test_nobody_is_called_back_where_blocks_are_freed_late() -> None:
    called: list[Any] = []
    scheduler = Scheduler(connector(call_back=called.append))
    scheduler.defer_block_free = True
    assert _reset_prefix_cache(lambda self, running: "reset")(scheduler, True) == "reset"
    assert scheduler.freed == called == []


def test_a_step_is_over_before_its_outputs_are_looked_at() -> None:
    happened: list[str] = []
    side = connector(
        processed=lambda: happened.append("over"), reported=lambda *_: happened.append("reported")
    )
    scheduler = SimpleNamespace(connector=side, requests={}, **IDLE)
    wrapped = _update_from_output(lambda *_: happened.append("updated"))
    wrapped(scheduler, None, output({}))
    wrapped(scheduler, None, SimpleNamespace(kv_connector_output=None))
    assert happened == ["over", "reported", "updated", "over", "updated"]


def test_the_parts_of_vllms_scheduler_that_a_reset_touches_are_there() -> None:
    """They are made in its constructor, which needs an engine's configuration."""
    from vllm.v1.core.sched.scheduler import Scheduler as Real

    assert callable(Real._set_kv_fetch_stage)
    assert callable(Real._free_blocks)
    made = {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Real.__init__))))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert made >= {
        "connector",
        "requests",
        "finished_recving_kv_req_ids",
        "deferred_waiting",
        "_inflight_prefills",
        "kv_cache_manager",
        "num_spec_tokens",
        "defer_block_free",
    }
    assert hasattr(Real, "kv_holding_waiting") or "kv_holding_waiting" in made


@pytest.mark.parametrize(
    ("computed", "placeholders", "is_session", "is_ours", "is_drafting", "counted"),
    [
        (21, 0, True, True, True, 18),
        (18, 0, True, True, True, 18),  # nothing was accepted behind the end
        (15, 0, True, True, True, 15),
        (22, 4, True, True, True, 22),  # asynchronous scheduling subtracts placeholders itself
        (21, 0, False, True, True, 21),
        (21, 0, True, False, True, 21),
        (21, 0, True, True, False, 21),
    ],
)
def test_drafts_behind_the_end_of_an_answer_are_not_counted(
    computed: int,
    placeholders: int,
    is_session: bool,
    is_ours: bool,
    is_drafting: bool,
    counted: int,
) -> None:
    """Of a session with 19 tokens, the last of which was sampled just now."""
    scheduler = SimpleNamespace(
        connector=connector() if is_ours else object(), num_spec_tokens=3 * is_drafting
    )
    ended = SimpleNamespace(
        resumable=is_session,
        num_tokens=19,
        num_computed_tokens=computed,
        num_output_placeholders=placeholders,
    )
    seen: list[int] = []

    def handle(self: Any, request: Any) -> bool:
        seen.append(request.num_computed_tokens)
        return not request.resumable

    assert _handle_stopped_request(handle)(scheduler, ended) is not is_session
    assert seen == [counted]
