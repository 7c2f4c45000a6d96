# SPDX-License-Identifier: Apache-2.0
"""Rows by edit and arm, and the summary."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench.agents.arms import NONE, PREFIX
from bench.agents.tokens import Tokens
from bench.edits.distance import Apart
from bench.edits.serving import Asked
from bench.harness import SuiteResult
from bench.quality.statistics import bootstrap_interval

_AT, _LATER = "at", "later"

Cell = tuple[str, str]
"""Edit and arm."""


def result_of(asked: Sequence[Asked], apart: Sequence[Apart], best: str) -> SuiteResult:
    """Everything that was measured, as figures.

    Args:
        asked: over HTTP.
        apart: distances from full prefill.
        best: the arm that the summary is about.
    """
    cells: dict[Cell, list[Asked]] = defaultdict(list)
    for one in asked:
        cells[one.edit, one.arm].append(one)
    distances: dict[Cell, list[Apart]] = defaultdict(list)
    for one_apart in apart:
        distances[one_apart.edit, one_apart.arm].append(one_apart)
    rows = [
        _row(cell, cells[cell], cells.get((cell[0], PREFIX), []), distances[cell]) for cell in cells
    ]
    return {"rows": rows, "summary": _summary(rows, best)}


def _row(
    cell: Cell, asked: Sequence[Asked], prefix: Sequence[Asked], apart: Sequence[Apart]
) -> dict[str, Any]:
    row: dict[str, Any] = {"edit": cell[0], "arm": cell[1]}
    row["conversations"] = len({one.conversation for one in asked})
    for name, mine, theirs in (
        (_AT, _at(asked), _at(prefix)),
        (_LATER, _later(asked), _later(prefix)),
    ):
        tokens = sum((one.tokens for one in mine), Tokens())
        row |= {
            f"{name}_prompt": tokens.prompt / max(1, len(mine)),
            f"{name}_prefix_share": tokens.prefix / max(1, tokens.prompt),
            f"{name}_known_share": (tokens.prefix + tokens.equal) / max(1, tokens.prompt),
            f"{name}_work": _work(tokens),
            f"{name}_ttft_s": statistics.median(one.ttft_s for one in mine) if mine else None,
            f"{name}_right": statistics.fmean(one.right for one in mine) if mine else None,
        }
        row |= _ratios(name, mine, theirs)
    return row | _distances(apart)


def _at(asked: Sequence[Asked]) -> list[Asked]:
    return [one for one in asked if one.turn == 0]


def _later(asked: Sequence[Asked]) -> list[Asked]:
    return [one for one in asked if one.turn > 0]


def _work(tokens: Tokens) -> float:
    """Tokens computed, in units of a token at all layers, of those behind the prefix hit."""
    return tokens.computed / max(1, tokens.prompt - tokens.prefix)


def _ratios(name: str, mine: Sequence[Asked], theirs: Sequence[Asked]) -> dict[str, Any]:
    """Times to the first token over those of the prefix cache, conversation by conversation."""
    other = {(one.conversation, one.turn): one.ttft_s for one in theirs}
    by_conversation: dict[int, list[float]] = defaultdict(list)
    for one in mine:
        if (one.conversation, one.turn) in other:
            ratio = one.ttft_s / other[one.conversation, one.turn]
            by_conversation[one.conversation].append(ratio)
    if not by_conversation:
        return {}
    ratios = [statistics.median(found) for found in by_conversation.values()]
    low, high = bootstrap_interval(ratios)
    return {
        f"{name}_ttft_over_prefix": statistics.median(ratios),
        f"{name}_ttft_over_prefix_mean": statistics.fmean(ratios),
        f"{name}_ttft_over_prefix_low": low,
        f"{name}_ttft_over_prefix_high": high,
    }


def _distances(apart: Sequence[Apart]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, some in (
        (_AT, [one for one in apart if one.turn == 0]),
        (_LATER, [one for one in apart if one.turn]),
    ):
        if some:
            kl = sorted(one.first_kl for one in some)
            row |= {
                f"{name}_compared": len(some),
                f"{name}_kl_p50": statistics.median(kl),
                f"{name}_kl_p90": kl[min(len(kl) - 1, int(0.9 * len(kl)))],
                f"{name}_agreement": statistics.fmean(one.agreement for one in some),
            }
    return row


def _summary(rows: Sequence[Mapping[str, Any]], best: str) -> dict[str, Any]:
    """By edit, of one arm. Behind an edit the prefix cache's arm computes all in full, too."""
    full = (PREFIX, NONE)  # the last that was measured counts
    right = {row["edit"]: row["at_right"] for arm in full for row in rows if row["arm"] == arm}
    summary: dict[str, Any] = {"arm": best}
    for row in rows:
        if row["arm"] != best:
            continue
        edit = row["edit"]
        found = {
            "ttft_over_prefix": row.get("at_ttft_over_prefix"),
            "work": row["at_work"],
            "later_ttft_over_prefix": row.get("later_ttft_over_prefix"),
            "right_over_full": row["at_right"] / right[edit] if right.get(edit) else None,
            "kl_p90": row.get("at_kl_p90"),
        }
        summary |= {f"{edit}_{name}": value for name, value in found.items()}
    return summary
