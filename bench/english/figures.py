# SPDX-License-Identifier: Apache-2.0
"""From records to figures: rows by task, donors and policy, and what a run comes to.

Every policy is compared with full prefill on the same examples, and the default with `shift`. Each
of these two families of comparisons is corrected for all of its cells (Holm). Tasks of which full
prefill answers less than half are reported by divergence only: there is no accuracy to lose. What
counts in figures of all tasks together is decided on other examples (`_counted`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy import stats

from bench.english.arms import CLOSE, DEFAULT, FULL, SHIFT
from bench.english.donors import KNOWLEDGE
from bench.english.records import Outcome, Record
from bench.harness import Row, SuiteResult
from bench.quality import statistics
from bench.quality.figures import shown_p, verdict

ABLE = 0.5
"""Least accuracy of full prefill at which accuracy is reported."""
POOLS = {
    "default": ("siblings", "reversed"),
    "alone": ("alone",),
    "stream": ("stream",),
    "kb": (KNOWLEDGE,),
}
"""Which donors a figure of the summary is about."""
IN_FULL = 0.999
"""Work from which on a request counts as computed in full."""
DIGITS = 4
KL_DIGITS = 5

Cell = tuple[str, str]
Cells = Mapping[Cell, Sequence[Record]]
Counted = Mapping[str, set[int]]
Summary = dict[str, Any]


def figures(records: Iterable[Record]) -> tuple[list[Row], Summary]:
    """Rows and summary of a run.

    Raises:
        ValueError: no records.
    """
    cells = _cells(records)
    if not cells:
        raise ValueError("nothing was measured")
    able = _able(cells)
    rows = [
        row
        for (task, donors), found in cells.items()
        for row in _rows(found, {"task": task, "donors": donors}, able[task])
    ]
    _correct(rows)
    counted = _counted(cells)
    return [*rows, *_pooled(cells, counted)], _summary(cells, able, counted, rows)


def in_cells(result: SuiteResult) -> list[Row]:
    """Rows of a task, donors and a policy: neither of one length, nor of all tasks together."""
    return [row for row in result["rows"] if "task" in row and "kind" not in row]


def _pooled(cells: Cells, counted: Counted) -> list[Row]:
    """What each policy reaches at how much work, by donors: all tasks together.

    Accuracy is of the examples that count; work and divergence are of all.
    """
    rows = []
    for donors in dict.fromkeys(donors for _, donors in cells):
        mine = {cell: found for cell, found in cells.items() if cell[1] == donors}
        every = [*chain(*mine.values())]
        for arm in dict.fromkeys(arm for record in every for arm in record.arms):
            outcomes = [record.arms[arm] for record in _with(every, arm)]
            rows.append(
                {
                    "pooled": arm,
                    "donors": donors,
                    "samples": len(outcomes),
                    **_against_full(mine, counted, arm),
                    **_divergences(outcomes),
                }
            )
    return rows


def _cells(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    cells: dict[Cell, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.task, record.donors].append(record)
    return dict(cells)


def _able(cells: Cells) -> dict[str, bool]:
    """Of each task, whether full prefill answers at least half of it."""
    return {task: fmean(by_number.values()) >= ABLE for task, by_number in _full(cells).items()}


def _counted(cells: Cells) -> dict[str, set[int]]:
    """Of each task, the numbers of the examples whose answers count.

    One half of them, the even or the odd numbers, counts where full prefill answers at least half
    of the other. By its own answers a half would count where full prefill was lucky and be left out
    where it was not, and with few examples a policy that loses nothing would seem to lose. The only
    example of a task counts.
    """
    counted: dict[str, set[int]] = {}
    for task, scores in _full(cells).items():
        halves = [{number for number in scores if number % 2 == odd} for odd in (0, 1)]
        counted[task] = {
            number
            for half, other in zip(halves, reversed(halves), strict=True)
            if not other or fmean(scores[one] for one in other) >= ABLE
            for number in half
        }
    return counted


def _full(cells: Cells) -> dict[str, dict[int, float]]:
    """Scores of full prefill by task and number: every example once, whatever its donors."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for (task, _), records in cells.items():
        scores[task] |= {record.number: record.full.score for record in records}
    return scores


def _rows(records: Sequence[Record], names: Row, able: bool) -> list[Row]:
    """Full prefill and every arm, all lengths together, then each length."""
    arms = dict.fromkeys(arm for record in records for arm in record.arms)
    rows = [_full_row(records, names, able)]
    rows += [_row(records, arm, names, able) for arm in arms]
    kinds = sorted({record.kind for record in records if record.kind})
    if len(kinds) > 1:
        for kind in kinds:
            some = [record for record in records if record.kind == kind]
            mine = names | {"kind": kind}
            rows.append(_full_row(some, mine, able))
            rows += [_row(some, arm, mine, able) for arm in arms if _with(some, arm)]
    return rows


def _with(records: Sequence[Record], arm: str) -> list[Record]:
    return [record for record in records if arm in record.arms]


def _full_row(records: Sequence[Record], names: Row, able: bool) -> Row:
    row = names | {"policy": FULL, "samples": len(records), "able": able}
    row |= _accuracy([record.full.score for record in records])
    return row | {"work": 1.0, "ttft_ms": _ttft([record.full.ttft_ms for record in records])}


def _row(records: Sequence[Record], arm: str, names: Row, able: bool) -> Row:
    pairs = [(record.arms[arm], record.full) for record in _with(records, arm)]
    mine = [one for one, _ in pairs]
    row: Row = names | {"policy": arm, "samples": len(pairs), "able": able}
    scores, full = [one.score for one in mine], [one.score for _, one in pairs]
    row |= _accuracy(scores)
    if able:
        low, high = statistics.difference_interval(scores, full)
        row |= {
            "difference": round(fmean(scores) - fmean(full), DIGITS),
            "difference_low": round(low, DIGITS),
            "difference_high": round(high, DIGITS),
            "differing": statistics.differing(scores, full),
            "p_against_full": statistics.paired_p(scores, full),
        }
    row |= _divergences(mine)
    agreement = [one.agreement for one in mine]
    low, high = statistics.interval(agreement)
    return row | {
        "agreement": round(fmean(agreement), DIGITS),
        "agreement_low": round(low, DIGITS),
        "agreement_high": round(high, DIGITS),
        "work": round(fmean(one.work for one in mine), DIGITS),
        "reused": round(fmean(one.reused for one in mine), DIGITS),
        "ttft_ms": _ttft([one.ttft_ms for one in mine]),
        "full_ttft_ms": _ttft([one.ttft_ms for _, one in pairs]),
    }


def _accuracy(scores: Sequence[float]) -> Row:
    low, high = statistics.interval(scores)
    return {
        "accuracy": round(fmean(scores), DIGITS),
        "low": round(low, DIGITS),
        "high": round(high, DIGITS),
    }


def _divergences(outcomes: Sequence[Outcome]) -> Row:
    first = [one.first_kl for one in outcomes]
    answer = [one.answer_kl for one in outcomes]
    return {
        **_divergence("first_kl", first),
        "kl_p90": _p90(first),
        **_divergence("answer_kl", answer),
    }


def _divergence(name: str, values: Sequence[float]) -> Row:
    low, high = statistics.bootstrap_interval(values)
    return {
        name: round(fmean(values), KL_DIGITS),
        f"{name}_low": None if low is None else round(low, KL_DIGITS),
        f"{name}_high": None if high is None else round(high, KL_DIGITS),
    }


def _p90(values: Sequence[float]) -> float:
    return round(float(np.quantile(values, 0.9)), KL_DIGITS)


def _ttft(values: Sequence[float]) -> float:
    return round(median(values), 2)


def _correct(rows: Iterable[Row]) -> None:
    """Corrected p and verdict of every comparison with full prefill; a length is none by itself."""
    for row in rows:
        if "kind" in row:
            row.pop("p_against_full", None)
    compared = [row for row in rows if "p_against_full" in row]
    corrected = statistics.holm([row["p_against_full"] for row in compared])
    for row, p in zip(compared, corrected, strict=True):
        row |= {"p_against_full": shown_p(row["p_against_full"]), "p_holm": shown_p(p)}
        row["verdict"] = verdict(row)


def _summary(
    cells: Cells, able: Mapping[str, bool], counted: Counted, rows: Sequence[Row]
) -> Summary:
    summary: Summary = {}
    for name, donors in POOLS.items():
        pooled = {cell: found for cell, found in cells.items() if cell[1] in donors}
        found = _against_full(pooled, counted, DEFAULT)
        summary |= {f"{name}_{key}": value for key, value in found.items()}
    worse, further = harm(cells, able)
    tasks = sorted(able)
    return summary | {
        "harm_cells": None if worse is None else len(worse),
        "harm": ", ".join(worse or ()),
        "harm_cells_kl": None if further is None else len(further),
        "harm_kl": ", ".join(further or ()),
        **_tail(cells),
        "drift_rank_correlation": drift_rank_correlation(cells),
        "tasks": len(tasks),
        "tasks_by_kl_only": ", ".join(task for task in tasks if not able[task]),
        "samples_per_cell": min(map(len, cells.values())),
        "comparisons": sum("p_holm" in row for row in rows),
        "margin": statistics.MARGIN,
    }


def _tail(cells: Cells) -> Summary:
    """How far the tenth that is furthest off is from full prefill, and what it took: under
    `max_drift` where that was measured, else of the default itself."""
    records = list(chain(*cells.values()))
    bounded = _with(records, CLOSE)
    arm = CLOSE if bounded else DEFAULT
    outcomes = [record.arms[arm] for record in bounded or _with(records, DEFAULT)]
    names = ("kl_p90", "kl_p90_of", "kl_p90_work", "in_full")
    if not outcomes:
        return dict.fromkeys(names)
    work = [one.work for one in outcomes]
    figures = (
        _p90([one.first_kl for one in outcomes]),
        arm,
        round(fmean(work), DIGITS),
        round(fmean(one >= IN_FULL for one in work), DIGITS),
    )
    return dict(zip(names, figures, strict=True))


def _against_full(cells: Cells, counted: Counted, arm: str) -> Summary:
    """Accuracy of an arm as a share of full prefill's, every cell of equal weight; its work.

    Accuracy is of the examples that count; work is of all.
    """
    found = {cell: mine for cell, all_ in cells.items() if (mine := _with(all_, arm))}
    summary: Summary = {"over_full": None, "work": None}
    if not found:
        return summary
    work = fmean(fmean(one.arms[arm].work for one in mine) for mine in found.values())
    summary["work"] = round(work, DIGITS)
    scores, full, weights = [], [], []
    for (task, _), mine in found.items():
        for record in mine:
            if record.number in counted[task]:
                scores.append(record.arms[arm].score)
                full.append(record.full.score)
                weights.append(1 / len(mine))
    of_full = np.dot(weights, full)
    if not of_full:
        return summary
    low, high = statistics.difference_interval(scores, full)
    return summary | {
        "over_full": round(float(np.dot(weights, scores) / of_full), DIGITS),
        "less_full_low": round(low, DIGITS),
        "less_full_high": round(high, DIGITS),
        "counted": len(scores),
    }


def harm(cells: Cells, able: Mapping[str, bool]) -> tuple[list[str] | None, list[str] | None]:
    """Cells in which the default is significantly worse than plain reuse: by accuracy, by KL.

    Returns:
        Their names; None where the two were not compared.
    """
    both = {cell: _with(_with(found, DEFAULT), SHIFT) for cell, found in cells.items()}
    both = {cell: found for cell, found in both.items() if found}
    if not both:
        return None, None
    capable = {cell: found for cell, found in both.items() if able[cell[0]]}
    return (
        _significant(capable, lambda one: -one.score),
        _significant(both, lambda one: one.answer_kl),
    )


def _significant(cells: Cells, loss: Any) -> list[str]:
    """Cells in which the default's loss is larger, p corrected for all of them."""
    losses = [
        [[loss(one.arms[arm]) for one in found] for arm in (DEFAULT, SHIFT)]
        for found in cells.values()
    ]
    corrected = statistics.holm([statistics.paired_p(*pair) for pair in losses])
    return [
        f"{task} {donors}"
        for (task, donors), (mine, other), p in zip(cells, losses, corrected, strict=True)
        if p < 1 - statistics.CONFIDENCE and fmean(mine) > fmean(other)
    ]


def drift_rank_correlation(cells: Cells) -> float | None:
    """Spearman's correlation of the reported drift with the first token's divergence.

    Of the default's requests; None where reports have no drift.
    """
    pairs = [
        (outcome.drift, outcome.first_kl)
        for found in cells.values()
        for record in _with(found, DEFAULT)
        if (outcome := record.arms[DEFAULT]).drift is not None
    ]
    if len(pairs) < 3:
        return None
    correlation = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    return None if np.isnan(correlation) else round(correlation, DIGITS)
