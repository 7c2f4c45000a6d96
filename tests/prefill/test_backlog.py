# SPDX-License-Identifier: Apache-2.0
"""Spread plans get their share of each step, in order, and nobody hears of those that ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.prefill import backlog
from vllm_segreuse.prefill.backlog import Backlog
from vllm_segreuse.prefill.chunks import Chunks


class Prefill:
    """`SparsePrefill` without a model: plans are numbers of chunks, of 10 layer-tokens each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.is_behind = False
        monkeypatch.setattr(backlog, "get_tp_group", lambda: SimpleNamespace(world_size=1))

    def prepare(self, plans: list[Any], chunk_work: int | None = None) -> Any:
        self.log.append(f"align {[plan.request_id for plan in plans]} {chunk_work}")
        return SimpleNamespace(plans=plans, chunk_work=chunk_work)

    def compute(self, prepared: Any) -> Chunks[str]:
        first = prepared.plans[0]
        name = first.request_id
        try:
            for _ in range(first.chunks):
                assert self.is_behind is first.spread
                self.log.append(name)
                yield 10
        except GeneratorExit:
            self.log.append(f"{name} is dropped")
            raise
        return f"report of {name}"

    @contextmanager
    def after_forward(self) -> Iterator[None]:
        self.is_behind = True
        yield
        self.is_behind = False


def plan(name: str, chunks: int, spread: bool = True) -> Any:
    return SimpleNamespace(request_id=name, chunks=chunks, spread=spread)


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
    assert subject.is_empty
    subject.take([plan("a", 3), plan("b", 2)])
    subject.take([plan("c", 0)])
    assert not subject.is_empty
    prefill.log.clear()
    assert subject.advance() == {}
    assert prefill.log == ["a", "a"]
    assert subject.advance() == {"a": "report of a"}
    assert prefill.log == ["a", "a", "a", "b"]
    assert subject.advance() == {"b": "report of b", "c": "report of c"}
    assert subject.advance() == {}


def test_a_share_is_never_exceeded_by_more_than_the_chunk_that_reaches_it(prefill: Prefill) -> None:
    for share, expected in ((1, 1), (10, 1), (11, 2), (25, 3), (29, 3)):
        subject = Backlog(prefill, share)  # type: ignore[arg-type]
        subject.take([plan("a", 9), plan("b", 9)])
        prefill.log.clear()
        subject.advance()
        assert prefill.log == ["a"] * expected
    assert subject.prefill is prefill


def test_a_plan_that_comes_later_waits_for_those_before_it(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    subject.take([plan("a", 3)])
    subject.advance()
    assert subject.take([plan("b", 1), plan("now", 1, spread=False)]) == "report of now"
    assert subject.advance() == {"a": "report of a"}
    assert subject.advance() == {"b": "report of b"}


def test_plans_of_a_step_are_finished_together_and_spread_ones_one_by_one(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    small = [plan("x", 1, spread=False), plan("y", 1, spread=False)]
    assert subject.take([small[0], plan("a", 1), small[1], plan("b", 1)]) == "report of x"
    assert prefill.log == ["align ['a'] 20", "align ['b'] 20", "align ['x', 'y'] None", "x"]
    assert subject.take([]) is None


def test_a_request_may_come_again_once_it_was_dropped(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    subject.take([plan("a", 5)])
    subject.advance()
    subject.drop({"a"})
    subject.take([plan("a", 1)])
    assert subject.advance() == {"a": "report of a"}
    assert subject.drop(["a"]) == set(), "it is done"


def test_only_those_under_way_are_dropped(prefill: Prefill) -> None:
    subject = Backlog(prefill, 20)  # type: ignore[arg-type]
    subject.take([plan("a", 3), plan("b", 1), plan("c", 1)])
    subject.advance()
    assert subject.drop(["a", "c", "nobody"]) == {"a", "c"}
    assert subject.drop(["a"]) == set()
    assert "a is dropped" in prefill.log
    assert subject.advance() == {"b": "report of b"}
