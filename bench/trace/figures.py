# SPDX-License-Identifier: Apache-2.0
"""Rows of a replay and of the estimate, and the summary.

of "engine"     a pass of an arm: what servers found, what the estimate says, times
of "ratios"     a policy over prefix caching
of "estimate"   the whole trace, by size of the cache
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.agents.tokens import Tokens
from bench.harness import SuiteResult, median
from bench.trace.serving import CLOSED, PREFIX, TIMED, Turn
from segreuse_tools.estimate.gain import SizeRow
from segreuse_tools.estimate.gain_text import size_name

_RESAMPLES = 2000

Pair = tuple[Turn, Turn]
"""The turns of the plugin and of prefix caching with the same prompts."""


def result_of(
    turns: Sequence[Turn],
    estimated: Mapping[str, SizeRow],
    whole: Sequence[SizeRow],
) -> SuiteResult:
    """Everything that was measured, as figures.

    Args:
        turns: of all arms; none if no engine was asked.
        estimated: of the slice, by policy. The summary's ratios are of the first one.
        whole: of the trace, by size of the cache, ascending.
    """
    turns = complete(turns, (PREFIX, *estimated))
    has = {turn.passed for turn in turns}
    rows = [
        _engine_row(passed, arm, turns, estimated)
        for passed in (TIMED, CLOSED)
        for arm in (PREFIX, *estimated)
        if passed in has
    ]
    ratios = [_ratios(policy, turns) for policy in estimated if turns]
    summary: dict[str, Any] = {
        "prefix_share": whole[-1].prefix_share,
        "any_position_share": {size_name(row.cache_tokens): _anywhere(row) for row in whole},
        "engine_minus_estimate": max(
            (row["known_share"] - row["estimated_known_share"] for row in rows),
            key=abs,
            default=None,
        ),
        "ttft_over_prefix": ratios[0].get("ttft_over_prefix") if ratios else None,
        "throughput_over_prefix": ratios[0].get("throughput_over_prefix") if ratios else None,
    }
    return {"rows": [*rows, *ratios, *map(_whole_row, whole)], "summary": summary}


def complete(turns: Sequence[Turn], arms: Sequence[str]) -> list[Turn]:
    """Without a turn that some arm has not had: the run was interrupted."""
    had = Counter((turn.passed, turn.number) for turn in turns)
    return [turn for turn in turns if had[turn.passed, turn.number] == len(arms)]


def _anywhere(row: SizeRow) -> float:
    """Of whole components, where the trace has some."""
    whole = row.whole_any_position_share
    return row.any_position_share if whole is None else whole


def _engine_row(
    passed: str, arm: str, turns: Sequence[Turn], estimated: Mapping[str, SizeRow]
) -> dict[str, Any]:
    mine = [turn for turn in turns if (turn.passed, turn.arm) == (passed, arm)]
    tokens = sum((turn.tokens for turn in mine), Tokens())
    ttft_s = [seconds for turn in mine for seconds in turn.ttft_s]
    row = next(iter(estimated.values())) if arm == PREFIX else estimated[arm]
    prefix, reused = row.prefix_share, 0.0
    if arm != PREFIX:
        prefix = row.any_position_prefix_share
        reused = next(it.reused_share for it in row.policies if it.policy == arm)
    return {
        "of": "engine",
        "pass": passed,
        "arm": arm,
        "requests": len(ttft_s),
        "prompt_tokens": tokens.prompt,
        "prefix_share": tokens.prefix / tokens.prompt,
        "known_share": (tokens.prefix + tokens.equal) / tokens.prompt,
        "estimated_prefix_share": prefix,
        "estimated_known_share": prefix + reused,
        "work": tokens.computed / tokens.prompt,
        "ttft_p50_s": median(ttft_s),
        "ttft_p90_s": statistics.quantiles(ttft_s, n=10)[-1],
        "tokens_per_s": tokens.prompt / sum(turn.seconds for turn in mine),
        "turns": len(mine),
    }


def _ratios(policy: str, turns: Sequence[Turn]) -> dict[str, Any]:
    ratios: dict[str, Any] = {"of": "ratios", "arm": policy}
    for name, passed, statistic in (
        ("ttft_over_prefix", TIMED, _ttft_over_prefix),
        ("throughput_over_prefix", CLOSED, _throughput_over_prefix),
    ):
        by_arm = [
            [turn for turn in turns if (turn.passed, turn.arm) == (passed, arm)]
            for arm in (policy, PREFIX)
        ]
        pairs = list(zip(*by_arm, strict=True))
        if not pairs:
            continue
        low, high = interval(pairs, statistic)
        ratios |= {name: statistic(pairs), f"{name}_low": low, f"{name}_high": high}
    return ratios


def _ttft_over_prefix(pairs: Sequence[Pair]) -> float:
    mine, theirs = ([s for turn in some for s in turn.ttft_s] for some in zip(*pairs, strict=True))
    return statistics.median(mine) / statistics.median(theirs)


def _throughput_over_prefix(pairs: Sequence[Pair]) -> float:
    mine, theirs = (sum(turn.seconds for turn in some) for some in zip(*pairs, strict=True))
    return theirs / mine


def interval(
    pairs: Sequence[Pair], statistic: Callable[[Sequence[Pair]], float]
) -> tuple[float, float]:
    """Interval of 95 % by bootstrap: turns are drawn, since requests of one wait for each other."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(pairs), size=(_RESAMPLES, len(pairs)))
    values = [statistic([pairs[number] for number in some]) for some in drawn]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _whole_row(row: SizeRow) -> dict[str, Any]:
    work = {it.policy: it.computed_share for it in row.policies}
    return {
        "of": "estimate",
        "cache": size_name(row.cache_tokens),
        "prefix_share": row.prefix_share,
        "any_position_share": row.any_position_share,
        "whole_prefix_share": row.whole_prefix_share,
        "whole_reordered_share": row.whole_reordered_share,
        "whole_any_position_share": row.whole_any_position_share,
        "too_long": row.too_long,
        **{f"work_{name.replace(' ', '_')}": share for name, share in work.items()},
    }
