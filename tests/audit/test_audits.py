# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half, from the request that is drawn to what came of it."""

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from segreuse_extras.audit import audits as module
from segreuse_extras.audit.audits import Audit, Audits
from segreuse_extras.audit.messages import AuditOrders, AuditResult, Recording, Reference
from segreuse_extras.audit.options import AuditOptions
from tests.audit.test_draw import Clock
from vllm_segreuse.config.metrics import SegReuseStats

REPORT = {
    "reused_tokens": 8,
    "recomputed_tokens": 2,
    "computed_share": 0.5,
    "in_full": False,
    "drift": 1.5,
    "policy": "shift",
}


class World:
    """Audits of an engine that does what a test says."""

    def __init__(self, most_tokens: Any = 3, make_request: Any = None, **options: Any) -> None:
        self.clock, self.stats = Clock(), SegReuseStats()
        self.lines: list[Any] = []
        self.made: list[Any] = []
        given = AuditOptions(**{"share": 1.0, "per_minute": 6000} | options)
        self.audits = Audits(
            given,
            self.stats,
            make_request or (lambda *made: self.made.append(made) or made[0]),
            most_tokens if callable(most_tokens) else lambda num_prompt_tokens: most_tokens,
            lambda audit, line: self.lines.append(line),
            lambda: 0.0,
            self.clock,
        )

    def admit(self, request_id: str, namespace: int = 7, **fields: Any) -> Audit:
        assert self.audits.draws(10, "shift", "docs")
        audit = Audit(
            request_id=request_id,
            policy="shift",
            namespace=namespace,
            namespace_class="docs",
            prompt=list(range(10)),
            found={"segments": 2},
            planned={"reused_tokens": 8},
            **{"fell_back": False, "lora_request": None} | fields,
        )
        self.audits.admitted(audit)
        return audit

    def end(self, request_id: str, answer: Any = (1, 2, 3, 4)) -> None:
        self.audits.ended(request_id, answer, REPORT)

    def due(self, running: int = 0, waiting: int = 0, room: bool = True) -> Any:
        return self.audits.next_reference(running, waiting, lambda tokens: room)

    def audit(self, request_id: str, kl: float = 0.25, **fields: Any) -> None:
        """All of it."""
        self.admit(request_id, **fields)
        self.end(request_id)
        reference = self.due()
        self.audits.compared({reference: AuditResult(kl, 2, 3)})
        self.end(reference)

    @property
    def outcomes(self) -> list[str]:
        counts = self.stats.data.get("audits_total", {}).get("shift", {}).get("docs", {})
        return list(Counter(counts).elements())


@pytest.fixture
def world() -> World:
    return World()


def test_an_audit_from_begin_to_end(world: World) -> None:
    world.admit("r")
    assert world.audits.take_orders() == AuditOrders({"r": Recording(10, 3)})
    assert world.audits.take_orders() is None
    assert world.due() is None, "the request runs"
    world.end("r")
    assert world.due() == "segreuse-audit-1"
    ((reference, audit, tokens),) = world.made
    assert (audit.request_id, tokens) == ("r", 4), "one more than are compared"
    expected = {reference: Reference("r", 10, (1, 2, 3))}
    assert world.audits.take_orders() == AuditOrders(compare=expected)
    world.audits.compared({"stranger": AuditResult(9.0, 0, 3)})
    world.audits.compared({reference: AuditResult(0.25, 2, 3)})
    world.end(reference)
    data = world.stats.data
    assert data["audit_kl"] == {"shift": {"docs": [0.25]}}
    assert data["audit_tokens_total"] == {"shift": {"docs": {"same": 2, "other": 1}}}
    assert world.outcomes == ["compared"]
    (line,) = world.lines
    assert line.pop("time") > 1e9
    assert line == {
        "outcome": "compared",
        "request_id": "r",
        "policy": "shift",
        "namespace_class": "docs",
        "namespace": "0000000000000007",
        "fallback": False,
        "found": {"segments": 2},
        "planned": {"reused_tokens": 8},
        "materialised": {name: REPORT[name] for name in REPORT if name != "policy"},
        "kl": 0.25,
        "agreed_tokens": 2,
        "compared_tokens": 3,
    }
    assert world.audits.take_orders() is None, "workers have dropped what they held"


def test_an_answer_may_be_shorter_than_what_is_compared(world: World) -> None:
    world.admit("r")
    world.end("r", answer=(5,))
    assert world.due()
    ((_, _, tokens),) = world.made
    assert tokens == 2
    orders = world.audits.take_orders()
    assert orders is not None
    assert [each.answer for each in orders.compare.values()] == [(5,)]


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ({}, True),
        ({"running": 4}, True),
        ({"running": 5}, False),
        ({"waiting": 1}, False),
        ({"room": False}, False),
    ],
)
def test_a_reference_begins_once_the_engine_is_idle_enough(
    world: World, busy: dict[str, Any], expected: bool
) -> None:
    world.admit("r")
    world.end("r")
    assert (world.due(**busy) is not None) == expected
    assert world.due() is None or not expected, "it begins once"


def test_room_is_wanted_for_all_of_it(world: World) -> None:
    world.admit("r")
    world.end("r")
    asked: list[int] = []
    world.audits.next_reference(0, 0, lambda tokens: bool(asked.append(tokens)))
    assert asked == [10 + 3 + 1]


def test_what_has_waited_too_long_is_dropped(world: World) -> None:
    for name in ("a", "b"):
        world.admit(name)
    world.end("a")
    world.clock.now += 20
    world.end("b")
    world.clock.now += 10
    assert world.due(waiting=1) is None
    assert world.outcomes == [], "it has waited for as long as it may"
    world.clock.now += 0.1
    assert world.due(waiting=1) is None
    assert world.outcomes == ["busy"]
    orders = world.audits.take_orders()
    assert orders is not None
    assert "a" in orders.forget
    assert world.due() == "segreuse-audit-1"
    assert world.made[0][1].request_id == "b"


def test_one_reference_runs_at_a_time(world: World) -> None:
    for name in ("a", "b"):
        world.admit(name)
        world.end(name)
    first = world.due()
    assert world.due() is None
    world.audits.compared({first: AuditResult(0.0, 3, 3)})
    assert world.due() == "segreuse-audit-2"


@pytest.mark.parametrize("how", ["without an answer", "computed anew", "reset"])
def test_what_cannot_be_compared_is_forgotten(world: World, how: str) -> None:
    world.admit("r")
    world.audits.take_orders()
    if how == "without an answer":
        world.end("r", answer=())
    elif how == "computed anew":
        world.audits.forget("r")
    else:
        assert world.audits.reset() is None
    world.end("r")
    assert world.outcomes == ["ended"]
    assert world.due() is None
    orders = world.audits.take_orders()
    assert orders is not None
    assert "r" in orders.forget


def test_a_reset_also_forgets_who_waits_and_names_the_reference_that_runs(world: World) -> None:
    for name in ("a", "b"):
        world.admit(name)
        world.end(name)
    reference = world.due()
    assert world.audits.reset() == reference
    world.end(reference)
    assert world.outcomes == ["ended", "failed"]
    assert world.due() is None
    assert world.audits.status()["under_way"] == 0


@pytest.mark.parametrize("kl", [None, math.nan, math.inf])
def test_a_reference_without_a_result_has_failed(world: World, kl: float | None) -> None:
    world.admit("r")
    world.end("r")
    reference = world.due()
    if kl is not None:
        world.audits.compared({reference: AuditResult(kl, 0, 0)})
    world.end(reference)
    assert world.outcomes == ["failed"]
    assert "audit_kl" not in world.stats.data
    orders = world.audits.take_orders()
    assert orders is not None
    assert {"r", reference} <= set(orders.forget)
    assert world.lines[0]["kl"] is None


def test_a_reference_whose_adapter_is_gone_does_not_begin(world: World, tmp_path: Path) -> None:
    """The worker would not find it, and the engine would end."""
    there = LoRARequest("adapter", 1, str(tmp_path))
    gone = LoRARequest("adapter", 1, str(tmp_path / "gone"))
    for name, adapter in (("one", gone), ("two", there)):
        world.admit(name, lora_request=adapter)
        world.end(name)
    assert world.due() is None
    assert world.outcomes == ["failed"]
    assert world.due() == "segreuse-audit-1"


def test_others_are_no_business_of_the_audit(world: World) -> None:
    world.end("stranger")
    world.audits.forget("stranger")
    world.audits.compared({})
    assert world.stats.is_empty()


def test_prompts_with_no_room_behind_them_cost_no_others_place() -> None:
    world = World(most_tokens=lambda tokens: 3 if tokens < 10 else 0, per_minute=1)
    assert [world.audits.draws(n, "shift", "docs") for n in (10, 9, 9)] == [False, True, False]
    assert world.outcomes == ["too_long", "limit"]


def test_what_is_drawn_and_not_audited_is_counted_and_not_logged() -> None:
    world = World(per_minute=1, max_prompt_tokens=10)
    assert world.audits.draws(10, "shift", "docs")
    assert not world.audits.draws(10, "shift", "docs")
    assert not world.audits.draws(11, "shift", "docs")
    assert not World(most_tokens=0).audits.draws(10, "shift", "docs"), "no room for a token more"
    assert world.outcomes == ["limit", "too_long"]
    assert world.lines == []


def test_those_that_wait_count_as_under_way(world: World) -> None:
    for number in range(16):
        world.admit(str(number))
        if number % 2:
            world.end(str(number))
    assert world.due()
    assert not world.audits.draws(10, "shift", "docs")
    assert world.audits.status()["under_way"] == 16


# Drift.

BOUNDED = {"max_kl": 0.5, "min_audits": 3, "window": 3, "recover_s": 60}


def test_a_namespace_that_drifts_falls_back_and_recovers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.logger, "propagate", True)
    world = World(**BOUNDED, on_drift="fallback")
    for number in range(2):
        world.audit(f"a{number}", kl=0.9)
    assert not world.audits.falls_back(7)
    with caplog.at_level(logging.INFO, logger=module.logger.name):
        world.audit("a3", kl=0.9)
        assert world.audits.falls_back(7)
        assert not world.audits.falls_back(8)
        assert "3 of the last 3 audits of namespace 0000000000000007 (class docs)" in caplog.text
        assert "its requests run with full for 60 s" in caplog.text
        assert world.stats.data["audit_drifted_total"] == {"docs": {"drifted": 1}}
        (shown,) = world.audits.status()["drifted"]
        assert shown == {
            "namespace": "0000000000000007",
            "namespace_class": "docs",
            "audits": 3,
            "above": 3,
            "recovers_s": 60.0,
        }
        world.clock.now += 60
        assert not world.audits.falls_back(7)
        world.due()
        assert "is audited anew" in caplog.text
    counted = world.stats.data["audit_drifted_total"]
    assert counted == {"docs": {"drifted": 1, "recovered": 1}}
    assert world.audits.status()["drifted"] == []


def test_a_drift_that_is_only_reported_changes_nothing() -> None:
    world = World(**BOUNDED)
    for number in range(3):
        world.audit(str(number), kl=0.9)
    assert world.stats.data["audit_drifted_total"] == {"docs": {"drifted": 1}}
    assert not world.audits.falls_back(7)


def test_audits_under_the_fallback_say_nothing_of_the_own_options() -> None:
    world = World(**BOUNDED, on_drift="fallback")
    for number in range(5):
        world.audit(str(number), kl=0.9, fell_back=True)
    assert not world.audits.falls_back(7)
    assert len(world.stats.data["audit_kl"]["shift"]["docs"]) == 5


def test_the_route_shows_the_last_ones(world: World) -> None:
    for number in range(3):
        world.audit(str(number), kl=0.1 * number)
    status = world.audits.status()
    assert status["outcomes"] == {"compared": 3}
    assert [each["kl"] for each in status["recent"]] == [0.0, 0.1, 0.2]
    assert set(status["recent"][0]) == {
        *("time", "policy", "namespace_class", "namespace", "fallback"),
        *("kl", "agreed_tokens", "compared_tokens"),
    }, "no request is named"


def test_the_route_shows_so_many(world: World) -> None:
    for number in range(203):
        world.audit(str(number), kl=number)
        world.clock.now += 60
    recent = world.audits.status()["recent"]
    assert [each["kl"] for each in recent] == [float(number) for number in range(3, 203)]


# Errors.


def test_an_error_ends_the_audits_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.logger, "propagate", True)

    def fails(*_: Any) -> Any:
        raise ArithmeticError("this one")

    world = World(make_request=fails)
    world.admit("r")
    world.end("r")
    with caplog.at_level(logging.ERROR, logger=module.logger.name):
        assert world.due() is None
    assert "no more audits, after an error in next_reference" in caplog.text
    assert world.audits.broken
    assert world.audits.status()["failed"] is True
    assert not world.audits.draws(10, "shift", "docs")
    assert world.due() is None
    world.end("r")
