# SPDX-License-Identifier: Apache-2.0
"""Calls reach the scheduler's half of the connector, and only of ours; and it hears of weights."""

from __future__ import annotations

from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu_worker import Worker

from vllm_segreuse.compat.engine_core import (
    CHANGING,
    _collective_rpc,
    _handle_shutdown,
    _run_busy_loop,
    segreuse_set_enabled,
    segreuse_status,
)


class Side:
    def __init__(self) -> None:
        self.enabled = True

    def set_enabled(self, enabled: bool) -> bool:
        self.enabled = enabled
        return self.enabled

    def status(self) -> dict[str, Any]:
        return {"enabled": self.enabled}


def core(connector: Any) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=lambda: connector))


def test_switch() -> None:
    side = Side()
    ours = core(SimpleNamespace(scheduler_side=side))
    assert segreuse_set_enabled(ours, False) is False
    assert side.enabled is False
    assert segreuse_status(ours) == {"enabled": False}


@pytest.mark.parametrize("connector", [None, object()])
def test_engine_without_our_connector_says_so(connector: Any) -> None:
    with pytest.raises(RuntimeError, match="does not run segment reuse"):
        segreuse_status(core(connector))


@pytest.mark.parametrize("is_running", [True, False])
def test_an_engine_that_is_told_to_end_does_nothing_more_for_nobody(is_running: bool) -> None:
    """It would go on until that is done."""
    happened: list[Any] = []
    side = SimpleNamespace(resetting=lambda: happened.append("given up") or ["part"])
    scheduler = SimpleNamespace(
        connector=SimpleNamespace(scheduler_side=side),
        finish_requests=lambda *given: happened.append(given),
    )
    engine = SimpleNamespace(is_running=lambda: is_running, scheduler=scheduler)
    ends = _handle_shutdown(lambda self: happened.append("asked") or True)
    assert ends(engine) is True
    given_up = ["given up", (["part"], RequestStatus.FINISHED_ABORTED)]
    assert happened == [*given_up * (not is_running), "asked"]


def test_an_engine_that_sleeps_is_woken_by_a_message_of_vllms_own() -> None:
    given: list[Any] = []
    side = SimpleNamespace(steps_by=lambda *functions: given.extend(functions))
    scheduler = SimpleNamespace(
        connector=SimpleNamespace(scheduler_side=side), pause_state=PauseState.UNPAUSED
    )
    engine = SimpleNamespace(scheduler=scheduler, input_queue=Queue())
    _run_busy_loop(lambda self: given.append("runs"))(engine)
    wake, is_paused, runs = given
    assert runs == "runs"
    assert engine.input_queue.empty()
    wake()
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    assert not is_paused()
    scheduler.pause_state = PauseState.PAUSED_ALL
    assert is_paused(), "as it is now"


def test_another_connectors_engine_ends_as_vllm_ends_it() -> None:
    scheduler = SimpleNamespace(connector=None)
    engine = SimpleNamespace(is_running=lambda: False, scheduler=scheduler)
    assert _handle_shutdown(lambda self: False)(engine) is False


class Ranks:
    """An engine whose ranks have a number each in place of a model; and one of them a draft.

    Args:
        busy: whether requests hold blocks, so that vLLM's reset fails.
    """

    def __init__(self, busy: bool = False, draft: float | None = None) -> None:
        self.weights = [1.0, 2.0]
        self.draft = draft
        self.is_sleeping = False
        self.num_read = 0
        self.happened: list[str] = []
        self.busy = busy
        side = SimpleNamespace(weights_changed=lambda: self.happened.append("told"))
        self.connector: Any = SimpleNamespace(scheduler_side=side)
        self.core = SimpleNamespace(model_executor=self, scheduler=self)
        self._call = _collective_rpc(lambda core, *given: self.collective_rpc(*given), self._digest)

    def call(self, method: Any) -> Any:
        return self._call(self.core, method)

    def collective_rpc(self, method: Any) -> list[Any]:
        """Of the executor."""
        if isinstance(method, str):
            self.happened.append(method)
            return [None, None]
        return [method(self._worker(rank)) for rank in (0, 1)]

    def _worker(self, rank: int) -> Any:
        draft = self.draft if rank else None
        return SimpleNamespace(
            rank=rank, get_model=lambda: self.weights[rank], get_draft_model=lambda: draft
        )

    def _digest(self, model: float) -> int:
        self.num_read += 1
        if model < 0:
            raise RuntimeError("weights that are on no device")
        return hash(model)

    def get_kv_connector(self) -> Any:
        """Of the scheduler."""
        return self.connector

    def reset_prefix_cache(self) -> bool:
        """Of the scheduler."""
        self.happened.append("reset")
        return not self.busy


@pytest.mark.parametrize("method", CHANGING)
def test_methods_that_bring_weights_make_vllm_forget(method: str) -> None:
    ranks = Ranks()
    assert ranks.call(method) == [None, None]
    assert ranks.happened == [method, "reset"]
    busy = Ranks(busy=True)
    busy.call(method)
    assert busy.happened == [method, "reset", "told"]


def test_what_changes_no_weight_changes_nothing() -> None:
    ranks = Ranks(draft=3.0)
    assert ranks.call(lambda worker: worker.rank) == [0, 1]
    assert ranks.call("profile") == [None, None]
    assert ranks.happened == ["profile"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_weight_of_any_rank_that_changes_is_noticed(rank: int) -> None:
    ranks = Ranks()

    def trained(worker: Any) -> None:
        if worker.rank == rank:
            ranks.weights[rank] += 1

    ranks.call(trained)
    assert ranks.happened == ["reset"]


def test_a_drafts_weights_count() -> None:
    ranks = Ranks(draft=3.0)

    def trained(worker: Any) -> None:
        ranks.draft = 4.0

    ranks.call(trained)
    assert ranks.happened == ["reset"]


def test_weights_that_a_failed_call_leaves_behind_count_too() -> None:
    ranks = Ranks()

    def fails(worker: Any) -> None:
        ranks.weights[worker.rank] += 1
        raise ArithmeticError("half way")

    with pytest.raises(ArithmeticError, match="half way"):
        ranks.call(fails)
    assert ranks.happened == ["reset"]


def test_weights_that_cannot_be_read_count_as_others() -> None:
    ranks = Ranks()
    ranks.weights[1] = -1.0
    ranks.call("profile")
    assert ranks.happened == ["profile", "reset"]


def test_nobody_reads_the_weights_of_an_engine_that_sleeps() -> None:
    ranks = Ranks()
    ranks.is_sleeping = True
    ranks.call("wake_gently")
    assert ranks.happened == ["wake_gently", "reset"]
    assert ranks.num_read == 0


@pytest.mark.parametrize("started", [True, False])
def test_other_engines_and_those_that_start_are_left_alone(started: bool) -> None:
    ranks = Ranks()
    ranks.connector = None
    if not started:
        del ranks.core.scheduler
    ranks.call("reload_weights")
    assert ranks.happened == ["reload_weights"]


def test_vllms_workers_have_the_methods_that_are_known_by_name() -> None:
    assert [name for name in CHANGING if not hasattr(Worker, name)] == []
