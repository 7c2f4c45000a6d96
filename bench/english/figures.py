# SPDX-License-Identifier: Apache-2.0
"""From records to figures: rows by task, donors and policy, and what a run comes to.

Every policy is compared with full prefill on the same examples, and the default with `shift`. Each
of these two families of comparisons is corrected for all of its cells (Holm). Tasks of which full
prefill answers less than half are reported by divergence only: there is no accuracy to lose. What
counts in figures of all tasks together is decided on other examples (`pooling.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy import stats

from bench.english.arms import CLOSE, DEFAULT, FULL, SHIFT
from bench.english.donors import KNOWLEDGE
from bench.english.losses import by_documents, by_max_drift
from bench.english.pooling import (
    DIGITS,
    KL_DIGITS,
    Cells,
    Counted,
    Summary,
    able_tasks,
    against_full,
    by_cell,
    by_donors,
    counted_numbers,
    p90,
    with_arm,
)
from bench.english.records import Outcome, Record
from bench.harness import Row, SuiteResult
from bench.quality import statistics
from bench.quality.figures import shown_p, verdict

POOLS = {
    "default": ("siblings", "reversed"),
    "alone": ("alone",),
    "stream": ("stream",),
    "kb": (KNOWLEDGE,),
}
"""Which donors a figure of the summary is about."""
IN_FULL = 0.999
"""Work from which on a request counts as computed in full."""


def figures(records: Iterable[Record]) -> tuple[list[Row], Summary]:
    """Rows and summary of a run.

    Raises:
        ValueError: no records.
    """
    cells = by_cell(records)
    if not cells:
        raise ValueError("nothing was measured")
    able = able_tasks(cells)
    rows = [
        row
        for (task, donors), found in cells.items()
        for row in _rows(found, {"task": task, "donors": donors}, able[task])
    ]
    _correct(rows)
    counted = counted_numbers(cells)
    rows += _pooled(cells, counted)
    rows += by_documents(cells, counted)
    rows += by_max_drift(cells, counted)
    return rows, _summary(cells, able, counted, rows)


def in_cells(result: SuiteResult) -> list[Row]:
    """Rows of a task, donors and a policy: neither of one length, nor of all tasks together."""
    return [row for row in result["rows"] if "task" in row and "kind" not in row]


def _pooled(cells: Cells, counted: Counted) -> list[Row]:
    """What each policy reaches at how much work, by donors: all tasks together.

    Accuracy is of the examples that count; work and divergence are of all.
    """
    rows = []
    for donors, mine in by_donors(cells):
        every = [*chain(*mine.values())]
        for arm in dict.fromkeys(arm for record in every for arm in record.arms):
            outcomes = [record.arms[arm] for record in with_arm(every, arm)]
            rows.append(
                {
                    "pooled": arm,
                    "donors": donors,
                    "samples": len(outcomes),
                    **against_full(mine, counted, arm),
                    **_divergences(outcomes),
                }
            )
    return rows


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
            rows += [_row(some, arm, mine, able) for arm in arms if with_arm(some, arm)]
    return rows


def _full_row(records: Sequence[Record], names: Row, able: bool) -> Row:
    row = names | {"policy": FULL, "samples": len(records), "able": able}
    row |= _accuracy([record.full.score for record in records])
    return row | {"work": 1.0, "ttft_ms": _ttft([record.full.ttft_ms for record in records])}


def _row(records: Sequence[Record], arm: str, names: Row, able: bool) -> Row:
    pairs = [(record.arms[arm], record.full) for record in with_arm(records, arm)]
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
        "kl_p90": p90(first),
        **_divergence("answer_kl", answer),
    }


def _divergence(name: str, values: Sequence[float]) -> Row:
    low, high = statistics.bootstrap_interval(values)
    return {
        name: round(fmean(values), KL_DIGITS),
        f"{name}_low": None if low is None else round(low, KL_DIGITS),
        f"{name}_high": None if high is None else round(high, KL_DIGITS),
    }


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
        found = against_full(pooled, counted, DEFAULT)
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
    bounded = with_arm(records, CLOSE)
    arm = CLOSE if bounded else DEFAULT
    outcomes = [record.arms[arm] for record in bounded or with_arm(records, DEFAULT)]
    names = ("kl_p90", "kl_p90_of", "kl_p90_work", "in_full")
    if not outcomes:
        return dict.fromkeys(names)
    work = [one.work for one in outcomes]
    figures = (
        p90([one.first_kl for one in outcomes]),
        arm,
        round(fmean(work), DIGITS),
        round(fmean(one >= IN_FULL for one in work), DIGITS),
    )
    return dict(zip(names, figures, strict=True))


def harm(cells: Cells, able: Mapping[str, bool]) -> tuple[list[str] | None, list[str] | None]:
    """Cells in which the default is significantly worse than plain reuse: by accuracy, by KL.

    Returns:
        Their names; None where the two were not compared.
    """
    both = {cell: with_arm(with_arm(found, DEFAULT), SHIFT) for cell, found in cells.items()}
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
        for record in with_arm(found, DEFAULT)
        if (outcome := record.arms[DEFAULT]).drift is not None
    ]
    if len(pairs) < 3:
        return None
    correlation = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    return None if np.isnan(correlation) else round(correlation, DIGITS)
