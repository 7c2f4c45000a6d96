# SPDX-License-Identifier: Apache-2.0
"""An error in a pass costs its requests their reuse, on all ranks alike; between ranks it ends the
engine, since the others would wait for ever."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_segreuse.plan import Pieces, Recipe, ReusePlan
from vllm_segreuse.prefill import backlog
from vllm_segreuse.prefill.chunks import finish


def plan(name: str = "request") -> ReusePlan:
    """Eight tokens of which half are reused."""
    always = np.arange(8) < 4
    pieces = Pieces.from_table([(4, 4, 1, 0, 0)])
    return ReusePlan(
        name, 0, 8, np.arange(8, dtype=np.int32), pieces, Recipe.without_choice(always), [1], 0
    )


def in_full(prepared: Any) -> list[bool]:
    """And that is reported."""
    assert all(each.reports == each.recipe.always.all() for each in prepared.plans)
    return [bool(each.recipe.always.all()) for each in prepared.plans]


class Pass:
    """`SparsePrefill` as far as it can fail.

    Args:
        fails: which of its calls do, by name and count from 0.
    """

    def __init__(self, *fails: tuple[str, int]) -> None:
        self._fails = fails
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        number = self.calls.count(name)
        self.calls.append(name)
        if (name, number) in self._fails:
            raise ArithmeticError(f"{name} {number}")

    def prepare(
        self, plans: list[ReusePlan], chunk_work: int | None = None, apart: bool = False
    ) -> Any:
        assert apart is bool(self.calls), "what is computed in full is so one by one"
        self._call("prepare")
        return SimpleNamespace(plans=plans, chunk_work=chunk_work)

    def compute(self, prepared: Any) -> Iterator[int]:
        self._call("compute")
        yield 5
        self._call("finish")
        return prepared


class Ended(BaseException):
    """The process would have ended."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many tensor-parallel ranks there are; groups come from `of_thread`."""

    def set_number(number: int) -> None:
        group = SimpleNamespace(world_size=number)
        monkeypatch.setattr(backlog, "get_tp_group", lambda: getattr(_of_thread, "group", group))

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(backlog.os, "_exit", end)
    monkeypatch.setattr(backlog.logging, "shutdown", lambda: None)
    return set_number


_of_thread = threading.local()


def prepare(subject: Pass, chunk_work: int | None = None) -> Any:
    return backlog.prepare_or_in_full(subject, [plan("a"), plan("b")], chunk_work)  # type: ignore[arg-type]


def compute(subject: Pass, chunk_work: int | None = None) -> Any:
    prepared: Any = SimpleNamespace(plans=[plan("a"), plan("b")], chunk_work=chunk_work)
    return finish(backlog.compute_or_in_full(subject, prepared))  # type: ignore[arg-type]


def test_without_an_error_plans_are_carried_out_as_they_are(ranks: Callable[[int], None]) -> None:
    ranks(1)
    assert in_full(prepare(Pass())) == in_full(compute(Pass())) == [False, False]


@pytest.mark.parametrize("chunk_work", [None, 70])
def test_a_plan_that_cannot_be_prepared_is_computed_in_full(
    chunk_work: int | None, ranks: Callable[[int], None]
) -> None:
    ranks(1)
    prepared = prepare(Pass(("prepare", 0)), chunk_work)
    assert in_full(prepared) == [True, True]
    assert prepared.chunk_work == chunk_work


@pytest.mark.parametrize("step", ["compute", "finish"])
def test_a_pass_that_fails_is_repeated_in_full(step: str, ranks: Callable[[int], None]) -> None:
    ranks(1)
    subject = Pass((step, 0))
    done = compute(subject, 70)
    assert in_full(done) == [True, True]
    assert done.chunk_work == 70
    assert subject.calls[-3:] == ["prepare", "compute", "finish"]


def test_an_error_without_reuse_is_vllms_to_handle(ranks: Callable[[int], None]) -> None:
    ranks(1)
    with pytest.raises(ArithmeticError, match="prepare 1"):
        prepare(Pass(("prepare", 0), ("prepare", 1)))
    with pytest.raises(ArithmeticError, match="compute 1"):
        compute(Pass(("compute", 0), ("compute", 1)))


@pytest.mark.parametrize("step", ["compute", "finish"])
def test_an_error_between_ranks_ends_the_engine(step: str, ranks: Callable[[int], None]) -> None:
    ranks(2)
    subject = Pass((step, 0))
    with pytest.raises(Ended) as ended:
        compute(subject)
    assert ended.value.args == (1,), "vLLM takes status 0 for an orderly end"
    assert "prepare" not in subject.calls, "it started over, and the other ranks did not"


def test_a_pass_that_is_dropped_between_chunks_is_no_error(ranks: Callable[[int], None]) -> None:
    ranks(2)
    prepared: Any = SimpleNamespace(plans=[plan()], chunk_work=None)
    chunks = backlog.compute_or_in_full(Pass(), prepared)  # type: ignore[arg-type]
    next(chunks)
    chunks.close()


def together(subjects: list[Pass], act: Callable[[Pass], Any], tmp_path: Any) -> list[Any]:
    """What each rank gets: threads of this process, with groups of torch's own."""
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), len(subjects))
    patience = timedelta(seconds=60)

    def run(rank: int) -> Any:
        group = torch.distributed.ProcessGroupGloo(store, rank, len(subjects), patience)
        _of_thread.group = SimpleNamespace(world_size=len(subjects), cpu_group=group)
        try:
            return act(subjects[rank])
        except Ended as ended:
            return ended

    with ThreadPoolExecutor(len(subjects)) as pool:
        return list(pool.map(run, range(len(subjects))))


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_ranks_agree_to_compute_in_full_if_one_of_them_cannot_prepare(
    failing: int | None, ranks: Callable[[int], None], tmp_path: Any
) -> None:
    ranks(2)
    subjects = [Pass(*[("prepare", 0)] * (rank == failing)) for rank in range(2)]
    found = [in_full(prepared) for prepared in together(subjects, prepare, tmp_path)]
    assert found == [[failing is not None] * 2] * 2


def test_a_rank_that_cannot_prepare_even_in_full_ends(
    ranks: Callable[[int], None], tmp_path: Any
) -> None:
    ranks(2)
    subjects = [Pass(), Pass(("prepare", 0), ("prepare", 1))]
    sound, ended = together(subjects, prepare, tmp_path)
    assert in_full(sound) == [True, True]
    assert isinstance(ended, Ended)
