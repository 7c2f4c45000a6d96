# SPDX-License-Identifier: Apache-2.0
"""Each sequence of orders is reported once, when its copies are over, in order; failed ones so."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vllm_segreuse.features.tier import copying as module
from vllm_segreuse.features.tier.copying import TierWorker
from vllm_segreuse.plan import IntArray, TierDone, TierOrders
from vllm_segreuse.prefill.mover import LoadedRows


class Mark:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


class Mover:
    """Copies nothing; marks are reached when a test says so, or at once."""

    def __init__(self, marks: bool) -> None:
        self.marks: list[Mark] | None = [] if marks else None
        self.stored: list[tuple[list[int], list[int]]] = []
        self.fails = False
        self.encoded: torch.Tensor | None = None

    def store(self, blocks: IntArray, rows: IntArray) -> torch.Tensor | None:
        if self.fails:
            raise ValueError("cannot copy")
        self.stored.append((blocks.tolist(), rows.tolist()))
        return self.encoded

    def load(self, rows: IntArray) -> Iterator[LoadedRows]:
        raise NotImplementedError

    def mark(self) -> Mark | None:
        if self.marks is None:
            return None
        self.marks.append(Mark())
        return self.marks[-1]


def orders(sequence: int, *pairs: tuple[int, int]) -> TierOrders:
    blocks, rows = np.array(pairs, np.int32).reshape(-1, 2).T
    return TierOrders(sequence, blocks, rows)


def test_on_a_cpu_a_sequence_is_reported_in_its_own_step() -> None:
    subject = TierWorker(mover := Mover(marks=False))
    assert not subject.end()
    subject.begin(orders(1, (4, 0), (7, 2)))
    assert mover.stored == [([4, 7], [0, 2])]
    assert subject.end().ranks == Counter({1: 1})
    assert not subject.end(), "once"


def test_orders_without_stores_are_reported_too() -> None:
    subject = TierWorker(mover := Mover(marks=False))
    subject.begin(orders(3))
    assert mover.stored == []
    assert subject.end().ranks == Counter({3: 1})


def test_on_a_gpu_sequences_are_reported_in_order_as_their_marks_are_reached() -> None:
    subject = TierWorker(mover := Mover(marks=True))
    assert mover.marks is not None
    for sequence in (1, 2, 3):
        subject.begin(orders(sequence, (sequence, 0)))
        assert not subject.end()
    assert len(mover.marks) == 3
    mover.marks[1].reached = True
    assert not subject.end(), "the one before is under way"
    mover.marks[0].reached = True
    assert subject.end().ranks == Counter({1: 1, 2: 1})
    mover.marks[2].reached = True
    assert subject.end().ranks == Counter({3: 1})
    assert not subject.end()


def test_what_could_not_be_stored_is_reported_as_failed_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.logger, "propagate", True)
    subject = TierWorker(mover := Mover(marks=True))
    mover.fails = True
    with caplog.at_level(logging.ERROR, logger=module.logger.name):
        subject.begin(orders(1, (4, 0), (5, 1)))
    assert "could not store 2 blocks" in caplog.text
    assert not subject.end()
    mover.fails = False
    subject.begin(orders(2, (4, 0)))
    marks: Any = mover.marks
    subject.end()
    for mark in marks:
        mark.reached = True
    done = subject.end()
    assert done.ranks == Counter({1: 1, 2: 1})
    assert done.failed == {1}
    subject.begin(orders(3, (4, 0)))
    subject.end()
    marks[-1].reached = True
    assert subject.end().failed == set(), "reported once"


def test_what_the_codec_cannot_store_is_reported_with_its_sequence() -> None:
    """And not before the mark is reached: on a GPU nobody knows it earlier."""
    subject = TierWorker(mover := Mover(marks=True))
    mover.encoded = torch.tensor([True, True, True])
    subject.begin(orders(1, (4, 0), (5, 1), (6, 2)))
    assert not subject.end()
    mover.encoded[1] = False
    marks: Any = mover.marks
    for mark in marks:
        mark.reached = True
    done = subject.end()
    assert done.without_code == {(1, 1)}
    assert done.failed == set()
    assert not subject.end().without_code, "once"


def looking(sequence: int) -> TierOrders:
    return TierOrders(sequence, *np.empty((2, 0), np.int32), verify=True)


@pytest.mark.parametrize("answer", [True, False, None])
def test_other_weights_are_reported_with_the_step_that_was_to_look(answer: bool | None) -> None:
    """Where nobody can say, they count as others."""
    unchanged = None if answer is None else lambda: answer
    subject = TierWorker(Mover(marks=False), unchanged)
    subject.begin(orders(1, (4, 0)))
    assert subject.end().other_weights == set()
    subject.begin(looking(2))
    done = subject.end()
    assert done.ranks == Counter({2: 1})
    assert done.other_weights == (set() if answer else {2})
    assert subject.end().other_weights == set()


def test_weights_that_cannot_be_read_count_as_others(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> bool:
        raise RuntimeError("no memory")

    subject = TierWorker(Mover(marks=False), fails)
    with caplog.at_level(logging.ERROR, "vllm.segreuse"):
        subject.begin(looking(1))
    assert "could not compare the model's weights" in caplog.text
    assert subject.end().other_weights == {1}


def test_one_rank_with_other_weights_is_enough() -> None:
    same = TierDone(Counter({5: 1}))
    other = TierDone(Counter({5: 1}), other_weights={5})
    for merged in (same.merged(other), other.merged(same)):
        assert merged == TierDone(Counter({5: 2}), other_weights={5})
