# SPDX-License-Identifier: Apache-2.0
"""Spread plans get their share of each step, in order, and nobody hears of those that ended."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.prefill import backlog, contained
from vllm_segreuse.prefill.backlog import Backlog
from vllm_segreuse.prefill.programs import Waves


class Prefill:
    """`contained` without a model: plans are numbers of waves, of 10 layer-tokens each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(backlog, "contained", self)

    def prepare(self, _: Any, plans: list[Any], wave_work: int | None = None) -> list[Any]:
        self.log.append(f"align {[plan.request_id for plan in plans]} {wave_work}")
        return plans

    def compute(self, _: Any, plans: list[Any]) -> Waves[str]:
        name = plans[0].request_id
        try:
            for _ in range(plans[0].waves):
                self.log.append(name)
                yield 10
        except GeneratorExit:
            self.log.append(f"{name} is dropped")
            raise
        return f"report of {name}"


def plan(name: str, waves: int, spread: bool = True) -> Any:
    return SimpleNamespace(request_id=name, waves=waves, spread=spread)


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Prefill:
    return Prefill(monkeypatch)


def test_small_plans_are_done_and_large_ones_aligned_at_once(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    assert subject.take([plan("large", 3), plan("small", 2, spread=False)]) == "report of small"
    assert prefill.log == ["align ['large'] 20", "align ['small'] None", "small", "small"]
    assert subject.take([plan("other", 1)]) is None


def test_a_step_does_its_share_of_the_oldest_first(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    subject.take([plan("a", 3), plan("b", 2)])
    subject.take([plan("c", 0)])
    prefill.log.clear()
    assert subject.advance() == {}
    assert prefill.log == ["a", "a"]
    assert subject.advance() == {"a": "report of a"}
    assert prefill.log == ["a", "a", "a", "b"]
    assert subject.advance() == {"b": "report of b", "c": "report of c"}
    assert subject.advance() == {}


def test_only_those_under_way_are_dropped(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    subject.take([plan("a", 3), plan("b", 1), plan("c", 1)])
    subject.advance()
    assert subject.drop(["a", "c", "nobody"]) == {"a", "c"}
    assert subject.drop(["a"]) == set()
    assert "a is dropped" in prefill.log
    assert subject.advance() == {"b": "report of b"}


def test_what_it_stands_in_for_exists() -> None:
    assert callable(contained.prepare)
    assert callable(contained.compute)
