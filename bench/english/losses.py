# SPDX-License-Identifier: Apache-2.0
"""Where the default loses: by the number of documents, and what a bound on drift would leave of it.

A prompt of many documents has many that were not in front when another was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from bench.english.arms import DEFAULT, SHIFT
from bench.english.pooling import (
    DIGITS,
    KL_DIGITS,
    Cells,
    Counted,
    against_full,
    by_donors,
    p90,
    with_arm,
)
from bench.english.records import Outcome, Record
from bench.harness import Row
from bench.quality import statistics

GROUPS = ((1, 7), (8, 15), (16, 23), (24, None))
"""Numbers of documents, the least and the most."""
BOUNDS = (4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
"""Of drift, beside none."""


def by_documents(cells: Cells, counted: Counted) -> list[Row]:
    """Of each kind of donors and each group of `GROUPS`: answers of full prefill, the default and
    plain reuse, of the examples that count; divergence, drift and work of the default, of all."""
    rows: list[Row] = []
    for donors, mine in by_donors(_of_default(cells)):
        records = [*chain(*mine.values())]
        for least, most in GROUPS:
            some = [one for one in records if least <= one.documents <= (most or one.documents)]
            if some:
                rows.append(
                    {"documents": _named(least, most), "donors": donors, **_of(some, counted)}
                )
    return rows


def _named(least: int, most: int | None) -> str:
    if most is None:
        return f"{least} and more"
    return f"up to {most}" if least == 1 else f"{least} to {most}"


def _of(records: Sequence[Record], counted: Counted) -> Row:
    outcomes = [one.arms[DEFAULT] for one in records]
    drifts = [one.drift for one in outcomes if one.drift is not None]
    row: Row = {
        "samples": len(records),
        "first_kl": round(fmean(one.first_kl for one in outcomes), KL_DIGITS),
        "answer_kl": round(fmean(one.answer_kl for one in outcomes), KL_DIGITS),
        "drift": round(fmean(drifts), DIGITS) if drifts else None,
        "work": round(fmean(one.work for one in outcomes), DIGITS),
    }
    counting = [one for one in records if one.number in counted[one.task]]
    row["counted"] = len(counting)
    if not counting:
        return row
    full = [one.full.score for one in counting]
    scores = [one.arms[DEFAULT].score for one in counting]
    low, high = statistics.difference_interval(scores, full)
    row |= {
        "full": round(fmean(full), DIGITS),
        "default": round(fmean(scores), DIGITS),
        "less_full_low": round(low, DIGITS),
        "less_full_high": round(high, DIGITS),
    }
    if plain := [one.arms[SHIFT].score for one in with_arm(counting, SHIFT)]:
        row["shift"] = round(fmean(plain), DIGITS)
    return row


def by_max_drift(cells: Cells, counted: Counted) -> list[Row]:
    """Of each kind of donors and each of `BOUNDS`, what the default would come to if requests above
    it were computed in full behind their pass. Nothing more is measured for it: what full prefill
    answers is known."""
    rows: list[Row] = []
    for donors, mine in by_donors(_of_default(cells)):
        outcomes = [one.arms[DEFAULT] for one in chain(*mine.values())]
        if all(one.drift is None for one in outcomes):
            continue
        for bound in (None, *BOUNDS):
            bounded = {
                cell: [_bounded(one, bound) for one in found] for cell, found in mine.items()
            }
            first_kl = [one.arms[DEFAULT].first_kl for one in chain(*bounded.values())]
            rows.append(
                {
                    "max_drift": "none" if bound is None else f"{bound:g}",
                    "donors": donors,
                    "samples": len(first_kl),
                    "in_full": round(fmean(_above(one, bound) for one in outcomes), DIGITS),
                    **against_full(bounded, counted, DEFAULT),
                    "first_kl": round(fmean(first_kl), KL_DIGITS),
                    "kl_p90": p90(first_kl),
                }
            )
    return rows


def _of_default(cells: Cells) -> Cells:
    """The records of which the default was asked, and the cells that have any."""
    asked = {cell: with_arm(found, DEFAULT) for cell, found in cells.items()}
    return {cell: found for cell, found in asked.items() if found}


def _above(outcome: Outcome, bound: float | None) -> bool:
    return bound is not None and outcome.drift is not None and outcome.drift > bound


def _bounded(record: Record, bound: float | None) -> Record:
    """The record if its default had `max_drift`: what is above it costs its pass, and all again."""
    outcome = record.arms[DEFAULT]
    if not _above(outcome, bound):
        return record
    in_full = replace(record.full, work=outcome.work + record.full.work)
    return replace(record, arms={**record.arms, DEFAULT: in_full})
