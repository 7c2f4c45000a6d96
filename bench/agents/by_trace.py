# SPDX-License-Identifier: Apache-2.0
"""Amounts of conversations and of their steps, put together by trace.

Conversations of a trace share a shop, its articles and the cache of one server, and the steps of a
conversation most of their text. Intervals take values for independent: they count traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from bench import harness
from bench.agents import verdicts
from bench.agents.arms import CONTENT, NONE, PREFIX, SIMILAR

DIGITS = 4
BASES = (NONE, PREFIX, CONTENT)
"""Arms that the summary compares similar segments with."""

Key = tuple[str, int, int]
"""Of a conversation: kind, trace, number."""


def savings(mine: Mapping[Key, float], base: Mapping[Key, float]) -> list[float]:
    """Share of an amount that is saved in each trace: of the sum over its conversations.

    Args:
        mine, base: the amount of each conversation; only those that are in both count.
    """
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for key in base:
        if key in mine:
            ours, theirs = sums.get(key[:2], (0.0, 0.0))
            sums[key[:2]] = ours + mine[key], theirs + base[key]
    return [1 - ours / theirs for ours, theirs in sums.values()]


def means(values: Iterable[tuple[Key, float]]) -> list[float]:
    """Mean of the values of each trace: of conversations, or of steps."""
    grouped: dict[tuple[str, int], list[float]] = {}
    for key, value in values:
        grouped.setdefault(key[:2], []).append(value)
    return [fmean(them) for them in grouped.values()]


def median_with_interval(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """A median, and its ends by `_low` and `_high`: None where there are too few values."""
    if not values:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    enough = len(values) >= harness.FEWEST_FOR_INTERVAL
    ends = harness.median_interval(values) if enough else (None, None)
    found = zip((name, f"{name}_low", f"{name}_high"), (median(values), *ends), strict=True)
    return {what: None if value is None else round(float(value), DIGITS) for what, value in found}


def summary(published: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Summary of a results file, with intervals of latency that count traces.

    Older files count conversations. Each has its rows, so their latency is computed anew. So is
    `h1`, unless success was measured by steps that the file does not have: it is left out then.
    `h1_latency` is the part of it that is about latency.

    Args:
        published: the file's own summary.
        rows: the file's own rows.
    """
    rows = list(rows)
    seconds, right = (_by_arm(rows, column) for column in ("seconds", "right"))
    if "traces" in published or not seconds:
        return dict(published)
    anew = dict(published)
    for base in BASES:
        saved = savings(seconds.get(SIMILAR, {}), seconds.get(base, {}))
        anew |= median_with_interval(f"latency_saving_over_{base}", saved)
    saved = savings(seconds.get(SIMILAR, {}), seconds.get(NONE, {}))
    anew |= {"traces": len(saved), "h1_latency": str(verdicts.h1_latency(saved))}
    if any(row.get("success_of") == SIMILAR for row in rows):
        anew.pop("h1", None)
    else:
        scores = (means(right.get(arm, {}).items()) for arm in (NONE, SIMILAR))
        anew["h1"] = str(verdicts.h1(saved, *scores))
    return anew


def _by_arm(rows: Iterable[Mapping[str, Any]], column: str) -> dict[str, dict[Key, float]]:
    """A column of the rows of single conversations, by arm."""
    found: dict[str, dict[Key, float]] = {}
    for row in rows:
        if "conversation" in row:
            kind, trace, number = row["conversation"].split()
            found.setdefault(row["under"], {})[kind, int(trace), int(number)] = row[column]
    return found
