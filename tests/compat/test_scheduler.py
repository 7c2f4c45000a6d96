# SPDX-License-Identifier: Apache-2.0
"""What workers told reaches the connector first, and is heard of those only who are waited for; a
reset takes the blocks of whoever is set aside. Other connectors see no change."""

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from vllm_segreuse.compat.scheduler import _reset_prefix_cache, _update_from_output


def output(metadata: Any, loaded: set[str] | None = None) -> SimpleNamespace:
    told = SimpleNamespace(kv_connector_worker_meta=metadata, finished_recving=loaded)
    return SimpleNamespace(kv_connector_output=told)


def request(status: str, computed: int = 8, preemptions: int = 0) -> SimpleNamespace:
    which = RequestStatus[status]
    return SimpleNamespace(
        request_id=status,
        status=which,
        is_finished=lambda: RequestStatus.is_finished(which),
        num_computed_tokens=computed,
        num_preemptions=preemptions,
    )


def updated(connector: Any, model_runner_output: Any) -> list[str]:
    """What happened, in order."""
    happened: list[str] = []
    if connector is not None:
        connector.worker_told = lambda metadata, _: happened.append(f"told {metadata}")
    scheduler = SimpleNamespace(connector=connector, requests={})
    wrapped = _update_from_output(lambda *_: happened.append("updated"))
    wrapped(scheduler, None, model_runner_output)
    return happened


def test_ours_is_told_first() -> None:
    assert updated(SimpleNamespace(), output("counts")) == ["told counts", "updated"]


def test_nothing_told_is_nothing_handed_on() -> None:
    assert updated(SimpleNamespace(), output(None)) == ["updated"]
    assert updated(SimpleNamespace(), SimpleNamespace(kv_connector_output=None)) == ["updated"]
    assert updated(None, output(None)) == ["updated"]


def test_other_connectors_are_left_alone() -> None:
    happened: list[str] = []
    scheduler = SimpleNamespace(connector=object(), requests={})
    _update_from_output(lambda *_: happened.append("updated"))(scheduler, None, output("theirs"))
    assert happened == ["updated"]


@pytest.mark.parametrize("ours", [True, False])
def test_a_word_is_heard_of_who_is_waited_for(ours: bool) -> None:
    waiting, ended, called_back = (
        request(status) for status in ("WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED", "WAITING")
    )
    connector = SimpleNamespace(**({"worker_told": None} if ours else {}))
    requests = {r.request_id: r for r in (waiting, ended, called_back)}
    scheduler = SimpleNamespace(connector=connector, requests=requests)
    told = output(None, {*requests, "gone"})
    _update_from_output(lambda *_: None)(scheduler, None, told)
    heard = {"WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED"} if ours else {*requests, "gone"}
    assert told.kv_connector_output.finished_recving == heard


class Scheduler:
    """The parts of vLLM's that a reset goes through, and what happened to them."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.held = [
            request("WAITING_FOR_REMOTE_KVS"),
            request("WAITING_FOR_REMOTE_KVS", preemptions=1),
            request("WAITING"),
            request("WAITING", computed=0),
            request("WAITING_FOR_STREAMING_REQ"),
        ]
        self.ended = request("FINISHED_ABORTED")
        self.requests = {str(i): r for i, r in enumerate([*self.held, self.ended])}
        self.kv_holding_waiting = self.held
        self.finished_recving_kv_req_ids = {"WAITING"}
        self.deferred_waiting, self._inflight_prefills = _Bag(), _Bag()
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
    scheduler = Scheduler(SimpleNamespace(**({"call_back": called.append} if ours else {})))
    reset = _reset_prefix_cache(lambda self, running, more=False: ("reset", running, more))
    assert reset(scheduler, running, more=True) == ("reset", running, True)
    if not (ours and running):
        assert scheduler.freed == called == []
        return
    loading, again, loaded, _, streaming = scheduler.held
    assert called == [loading, again, loaded]
    assert scheduler.freed == [scheduler.ended, loading, again, loaded]
    assert [r.status.name for r in called] == ["WAITING", "PREEMPTED", "WAITING"]
    assert [r.num_computed_tokens for r in called] == [0, 0, 0]
    assert streaming.num_computed_tokens == 8
    assert not scheduler.finished_recving_kv_req_ids
    assert scheduler.deferred_waiting.discarded == called, "it would be admitted a second time"
    assert scheduler._inflight_prefills.discarded == called, "blocks would be kept for it"
    assert scheduler.stages == called


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
    }
    assert hasattr(Real, "kv_holding_waiting") or "kv_holding_waiting" in made
