# SPDX-License-Identifier: Apache-2.0
"""What workers told reaches the connector before the step's requests end, and only ours."""

from types import SimpleNamespace
from typing import Any

from vllm_segreuse.compat.scheduler import _update_from_output


def output(metadata: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=metadata))


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
