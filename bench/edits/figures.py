# SPDX-License-Identifier: Apache-2.0
"""Rows by edit and arm, and the summary."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.agents.arms import NONE, PREFIX
from bench.agents.tokens import Tokens
from bench.edits.distance import divergence
from bench.edits.serving import Asked
from bench.harness import SuiteResult
from bench.quality.statistics import bootstrap_interval

_AT, _LATER = "at", "later"
_RESAMPLES = 2000

Cell = tuple[str, str]
"""Edit and arm."""


def result_of(asked: Sequence[Asked], best: str) -> SuiteResult:
    """Everything that was measured, as figures.

    Behind an edit the prefix cache's arm computes all in full, so that it is what full prefill
    says, unless the arm without any cache was measured, too.

    Args:
        asked: over HTTP.
        best: the arm that the summary is about.
    """
    cells: dict[Cell, list[Asked]] = defaultdict(list)
    for one in asked:
        cells[one.edit, one.arm].append(one)

    def of(edit: str, *arms: str) -> list[Asked]:
        return next((cells[edit, arm] for arm in arms if (edit, arm) in cells), [])

    rows = [
        _row(cell, mine, of(cell[0], PREFIX), of(cell[0], NONE, PREFIX))
        for cell, mine in [*cells.items()]
    ]
    return {"rows": rows, "summary": _summary(rows, best)}


def _row(
    cell: Cell, asked: Sequence[Asked], prefix: Sequence[Asked], full: Sequence[Asked]
) -> dict[str, Any]:
    row: dict[str, Any] = {"edit": cell[0], "arm": cell[1]}
    row["conversations"] = len({one.conversation for one in asked})
    for name, part in ((_AT, _at), (_LATER, _later)):
        mine = part(asked)
        tokens = sum((one.tokens for one in mine), Tokens())
        row |= {
            f"{name}_prompt": tokens.prompt / max(1, len(mine)),
            f"{name}_prefix_share": tokens.prefix / max(1, tokens.prompt),
            f"{name}_known_share": (tokens.prefix + tokens.equal) / max(1, tokens.prompt),
            f"{name}_work": _work(tokens),
            f"{name}_ttft_s": statistics.median(one.ttft_s for one in mine) if mine else None,
            f"{name}_right": statistics.fmean(one.right for one in mine) if mine else None,
        }
        row |= _ratios(name, mine, part(prefix)) | _distances(name, mine, part(full))
    return row | _right(asked, full)


def _at(asked: Sequence[Asked]) -> list[Asked]:
    return [one for one in asked if one.turn == 0]


def _later(asked: Sequence[Asked]) -> list[Asked]:
    return [one for one in asked if one.turn > 0]


def _work(tokens: Tokens) -> float:
    """Tokens computed, in units of a token at all layers, of those behind the prefix hit."""
    return tokens.computed / max(1, tokens.prompt - tokens.prefix)


def _pairs(mine: Sequence[Asked], theirs: Sequence[Asked]) -> dict[int, list[tuple[Asked, Asked]]]:
    """Equal turns under two arms, by conversation."""
    other = {(one.conversation, one.turn): one for one in theirs}
    found: dict[int, list[tuple[Asked, Asked]]] = defaultdict(list)
    for one in mine:
        if (one.conversation, one.turn) in other:
            found[one.conversation].append((one, other[one.conversation, one.turn]))
    return found


def _ratios(name: str, mine: Sequence[Asked], theirs: Sequence[Asked]) -> dict[str, Any]:
    """Times to the first token over those of the prefix cache, conversation by conversation."""
    by_conversation = _pairs(mine, theirs)
    if not by_conversation:
        return {}
    ratios = [
        statistics.median(one.ttft_s / other.ttft_s for one, other in pairs)
        for pairs in by_conversation.values()
    ]
    low, high = bootstrap_interval(ratios)
    return {
        f"{name}_ttft_over_prefix": statistics.median(ratios),
        f"{name}_ttft_over_prefix_mean": statistics.fmean(ratios),
        f"{name}_ttft_over_prefix_low": low,
        f"{name}_ttft_over_prefix_high": high,
    }


def _distances(name: str, mine: Sequence[Asked], full: Sequence[Asked]) -> dict[str, Any]:
    """First tokens' divergences from full prefill, and answers that are full prefill's."""
    pairs = [pair for found in _pairs(mine, full).values() for pair in found]
    if not pairs:
        return {}
    compared = [(one.likeliest, other.likeliest) for one, other in pairs if one.likeliest]
    kl = sorted(divergence(full, mine) for mine, full in compared) or [math.nan]
    return {
        f"{name}_kl_p50": statistics.median(kl),
        f"{name}_kl_p90": kl[min(len(kl) - 1, int(0.9 * len(kl)))],
        f"{name}_agreement": statistics.fmean(one.said == other.said for one, other in pairs),
    }


def _right(mine: Sequence[Asked], full: Sequence[Asked]) -> dict[str, Any]:
    """Right answers of all turns over those of full prefill, with an interval of 95 % by bootstrap
    of conversations."""
    by_conversation = _pairs(mine, full)
    counts = np.array(
        [
            [sum(one.right for one, _ in pairs), sum(other.right for _, other in pairs)]
            for pairs in by_conversation.values()
        ]
    ).reshape(-1, 2)
    if not counts[:, 1].sum():
        return {"right_over_full": None}
    rng = np.random.default_rng(0)
    drawn = counts[rng.integers(len(counts), size=(_RESAMPLES, len(counts)))].sum(axis=1)
    drawn = drawn[drawn[:, 1] > 0]
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return {
        "right_over_full": float(counts[:, 0].sum() / counts[:, 1].sum()),
        "right_over_full_low": float(low),
        "right_over_full_high": float(high),
    }


def _summary(rows: Sequence[Mapping[str, Any]], best: str) -> dict[str, Any]:
    """By edit, of one arm."""
    summary: dict[str, Any] = {"arm": best}
    for row in rows:
        if row["arm"] == best:
            found = {
                "ttft_over_prefix": row.get("at_ttft_over_prefix"),
                "work": row["at_work"],
                "later_ttft_over_prefix": row.get("later_ttft_over_prefix"),
                "right_over_full": row["right_over_full"],
                "kl_p90": row.get("at_kl_p90"),
            }
            summary |= {f"{row['edit']}_{name}": value for name, value in found.items()}
    return summary
