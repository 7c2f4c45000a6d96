# SPDX-License-Identifier: Apache-2.0
"""Many examples together: which of their answers count, and how an arm compares with full prefill
on these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from bench.english.records import Record
from bench.quality import statistics

ABLE = 0.5
"""Least accuracy of full prefill at which accuracy is reported."""
DIGITS = 4
KL_DIGITS = 5

Cell = tuple[str, str]
"""A task, and how its documents were computed."""
Cells = Mapping[Cell, Sequence[Record]]
Counted = Mapping[str, set[int]]
Summary = dict[str, Any]


def by_cell(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    cells: dict[Cell, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.task, record.donors].append(record)
    return dict(cells)


def by_donors(cells: Cells) -> Iterator[tuple[str, Cells]]:
    """The cells of each kind of donors."""
    for donors in dict.fromkeys(donors for _, donors in cells):
        yield donors, {cell: found for cell, found in cells.items() if cell[1] == donors}


def able_tasks(cells: Cells) -> dict[str, bool]:
    """Of each task, whether full prefill answers at least half of it."""
    return {
        task: fmean(by_number.values()) >= ABLE for task, by_number in full_scores(cells).items()
    }


def counted_numbers(cells: Cells) -> dict[str, set[int]]:
    """Of each task, the numbers of the examples whose answers count: see `counting`."""
    return counting(full_scores(cells))


def counting(full: Mapping[str, Mapping[int, float]]) -> dict[str, set[int]]:
    """Of each task, the numbers of the examples whose answers count, by full prefill's scores.

    One half of them, the even or the odd numbers, counts where full prefill answers at least half
    of the other. By its own answers a half would count where full prefill was lucky and be left out
    where it was not, and with few examples a policy that loses nothing would seem to lose. The only
    example of a task counts.
    """
    counted: dict[str, set[int]] = {}
    for task, scores in full.items():
        halves = [{number for number in scores if number % 2 == odd} for odd in (0, 1)]
        counted[task] = {
            number
            for half, other in zip(halves, reversed(halves), strict=True)
            if not other or fmean(scores[one] for one in other) >= ABLE
            for number in half
        }
    return counted


def full_scores(cells: Cells) -> dict[str, dict[int, float]]:
    """Scores of full prefill by task and number: every example once, whatever its donors."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for (task, _), records in cells.items():
        scores[task] |= {record.number: record.full.score for record in records}
    return scores


def with_arm(records: Sequence[Record], arm: str) -> list[Record]:
    return [record for record in records if arm in record.arms]


def against_full(cells: Cells, counted: Counted, arm: str) -> Summary:
    """How an arm compares with full prefill on the examples that count, and its work on all.

    The share of full prefill's accuracy and the interval of the difference are of the same mean:
    every example weighs the same, whatever its task. An example that was asked under several kinds
    of donors has one answer in full, and its answers of the arm go together: it is one value, their
    mean. In the work every prompt that was asked weighs the same.
    """
    records = with_arm([*chain(*cells.values())], arm)
    if not records:
        return {"over_full": None, "work": None}
    work = round(fmean(record.arms[arm].work for record in records), DIGITS)
    by_example: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        if record.number in counted[record.task]:
            by_example[record.task, record.number].append(record)
    examples = by_example.values()
    scores = [fmean(one.arms[arm].score for one in them) for them in examples]
    full = [fmean(one.full.score for one in them) for them in examples]
    if not any(full):
        return {"over_full": None, "work": work}
    low, high = statistics.difference_interval(scores, full)
    return {
        "over_full": round(sum(scores) / sum(full), DIGITS),
        "work": work,
        "less_full_low": round(low, DIGITS),
        "less_full_high": round(high, DIGITS),
        "counted": sum(map(len, examples)),
        "examples": len(examples),
    }


def p90(values: Sequence[float]) -> float:
    return round(float(np.quantile(values, 0.9)), KL_DIGITS)
