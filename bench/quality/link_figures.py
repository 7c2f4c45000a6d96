# SPDX-License-Identifier: Apache-2.0
"""From outcomes of `bench link` to figures: rows by task, kind and all together, and the order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from bench.harness import Row
from bench.quality import statistics
from bench.quality.figures import DIGITS, shown_p, verdict
from bench.quality.isolated import Asked

FULL = "full"
ALL = "all"
ORDER = ("link5", "link1", "link0", "untrained")
"""KVLink's: each at least as good as the one behind it."""

Answers = Mapping[str, Sequence[Asked]]
"""Outcomess by arm, all of the same examples in the same order."""


def figures(kinds: Sequence[tuple[str, str]], answers: Answers) -> tuple[list[Row], Row]:
    """Rows and summary.

    Args:
        kinds: task and kind of each example.
        answers: see above.
    """
    groups = _groups(kinds)
    rows = [_row(name, arm, where, answers) for name, where in groups.items() for arm in answers]
    compared = [row for row in rows if row["policy"] != FULL]
    pairs = [pair for pair in pairwise(ORDER) if set(pair) <= answers.keys()]
    ordered = [_difference(_scores(answers[a]), _scores(answers[b])) for a, b in pairs]
    corrected = statistics.holm([entry["p_against_full"] for entry in (*compared, *ordered)])
    for entry, p in zip((*compared, *ordered), corrected, strict=True):
        entry |= {"p_against_full": shown_p(entry["p_against_full"]), "p_holm": shown_p(p)}
        entry["verdict"] = verdict(entry)
    summary: Row = {arm: round(fmean(_scores(found)), DIGITS) for arm, found in answers.items()}
    for arm, found in answers.items():
        low, high = statistics.interval(_scores(found))
        summary |= {f"{arm}_low": round(low, DIGITS), f"{arm}_high": round(high, DIGITS)}
        summary[f"{arm}_work"] = round(fmean(one.work for one in found), DIGITS)
    for (a, b), entry in zip(pairs, ordered, strict=True):
        key = f"{a}_less_{b}"
        summary |= {
            key: entry["difference"],
            f"{key}_low": entry["difference_low"],
            f"{key}_high": entry["difference_high"],
            f"{key}_holm": entry["p_holm"],
            f"{key}_verdict": entry["verdict"],
        }
    return rows, summary | {"samples": len(kinds), "comparisons": len(corrected)}


def _groups(kinds: Sequence[tuple[str, str]]) -> dict[str, list[int]]:
    """Numbers of examples by what a row is about."""
    groups: dict[str, list[int]] = {ALL: list(range(len(kinds)))}
    by_task: dict[str, list[int]] = defaultdict(list)
    by_kind: dict[str, list[int]] = defaultdict(list)
    for number, (task, kind) in enumerate(kinds):
        by_task[task].append(number)
        by_kind[f"{task}, {kind}"].append(number)
    for task, numbers in by_task.items():
        groups[task] = numbers
        mine = {name: found for name, found in by_kind.items() if name.startswith(f"{task}, ")}
        if len(mine) > 1:
            groups |= dict(sorted(mine.items()))
    return groups


def _scores(found: Sequence[Asked]) -> list[float]:
    return [outcome.score for outcome in found]


def _row(name: str, arm: str, where: Sequence[int], answers: Answers) -> Row:
    mine = [answers[arm][number] for number in where]
    low, high = statistics.interval(_scores(mine))
    row: Row = {
        "task": name,
        "policy": arm,
        "samples": len(mine),
        "accuracy": round(fmean(_scores(mine)), DIGITS),
        "low": round(low, DIGITS),
        "high": round(high, DIGITS),
    }
    if arm != FULL:
        row |= _difference(_scores(mine), _scores([answers[FULL][number] for number in where]))
    row["work"] = round(fmean(one.work for one in mine), DIGITS)
    times = [one.ttft_ms for one in mine if one.ttft_ms is not None]
    row |= {"ttft_ms": round(median(times), 2) if times else None, "timed": len(times)}
    return row


def _difference(first: list[float], second: list[float]) -> Row:
    low, high = statistics.difference_interval(first, second)
    return {
        "difference": round(fmean(first) - fmean(second), DIGITS),
        "difference_low": round(low, DIGITS),
        "difference_high": round(high, DIGITS),
        "differing": statistics.differing(first, second),
        "p_against_full": statistics.paired_p(first, second),
    }
