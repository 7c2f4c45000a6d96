# SPDX-License-Identifier: Apache-2.0
"""From single requests to the figures of a run.

Times are compared between arms that got the same prompts. Every interval is of traces: neither the
steps of a conversation nor the conversations of a trace are independent (`by_trace`). Medians have
exact intervals where there are at least six traces; those of success and of distances are of the
means of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import numpy as np

from bench import harness
from bench.agents import by_trace, scoring, verdicts
from bench.agents.arms import CLOSE, CONTENT, NONE, PREFIX, SIMILAR, TESTED
from bench.agents.by_trace import DIGITS, Key
from bench.agents.by_trace import median_with_interval as _median
from bench.agents.distance import Apart
from bench.agents.serving import Free, Taken
from bench.agents.success import Paired
from bench.agents.tokens import Tokens
from bench.harness import Row
from bench.quality import statistics

ALL = "all"
_BINS = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0)


@dataclass
class Measured:
    """Everything that was measured.

    Attributes:
        taken: steps behind the right history, greedy.
        reruns: texts of traces by arm and trace, one for each seed, at a temperature.
        free: conversations that the model led.
        apart: distances from full prefill.
        paired: answers beside those of full prefill.
        similar: rows and summary of `bench similar`.
    """

    taken: list[Taken] = field(default_factory=list)
    reruns: dict[str, list[list[str]]] = field(default_factory=dict)
    free: list[Free] = field(default_factory=list)
    apart: list[Apart] = field(default_factory=list)
    paired: list[Paired] = field(default_factory=list)
    similar: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversation:
    """Sums of one conversation under one arm; `score` is the mean of its steps, `answer` that of
    its last step."""

    ttft_s: float
    total_s: float
    tokens: Tokens
    steps: int
    score: float
    answer: float


_AMOUNTS: Mapping[str, Callable[[Conversation], float]] = MappingProxyType(
    {
        "latency": lambda it: it.total_s,
        "ttft": lambda it: it.ttft_s,
        "work": lambda it: it.tokens.computed,
    }
)
"""What arms are compared by in the summary. Work is counted, so that no other load changes it."""


def result(measured: Measured) -> harness.SuiteResult:
    """Rows and summary of what is there."""
    told = conversations(measured.taken)
    rows = [
        *_served(told),
        *_by_share(measured.taken),
        *_led(measured.free),
        *_reruns(measured.reruns),
        *_distances(measured.apart),
        *_success(measured.paired),
        *measured.similar.get("rows", ()),
        *_single(told),
    ]
    return {"rows": rows, "summary": _summary(measured, told)}


def conversations(taken: Iterable[Taken]) -> dict[Key, dict[str, Conversation]]:
    """Conversations by key and arm."""
    steps: dict[Key, dict[str, list[Taken]]] = {}
    for it in taken:
        steps.setdefault(_key(it), {}).setdefault(it.arm, []).append(it)
    return {
        key: {arm: _conversation(mine) for arm, mine in by_arm.items()}
        for key, by_arm in steps.items()
    }


def _conversation(steps: Sequence[Taken]) -> Conversation:
    answered = [it.answered for it in steps]
    return Conversation(
        ttft_s=sum(it.ttft_s for it in answered),
        total_s=sum(it.total_s for it in answered),
        tokens=sum((it.tokens for it in answered), Tokens()),
        steps=len(steps),
        score=fmean(it.score for it in steps),
        answer=max(steps, key=lambda it: it.step).score,
    )


def savings(
    told: Mapping[Key, Mapping[str, Conversation]],
    arm: str,
    base: str,
    amount: Callable[[Conversation], float] = lambda it: it.total_s,
) -> list[float]:
    """Share of the base's time, or of another amount, that an arm saves, by trace."""

    def amounts(name: str) -> dict[Key, float]:
        return {key: amount(it[name]) for key, it in told.items() if name in it}

    return by_trace.savings(amounts(arm), amounts(base))


def _served(told: Mapping[Key, Mapping[str, Conversation]]) -> list[Row]:
    """By kind of trace and arm."""
    kinds = list(dict.fromkeys(kind for kind, *_ in told))
    names = list(dict.fromkeys(arm for it in told.values() for arm in it))
    rows = []
    for kind in [*kinds, ALL] if len(kinds) > 1 else kinds:
        mine = {key: it for key, it in told.items() if kind in (key[0], ALL)}
        for arm in names:
            found = [it[arm] for it in mine.values() if arm in it]
            if not found:
                continue
            tokens = sum((it.tokens for it in found), Tokens())
            rows.append(
                {
                    "trace": kind,
                    "arm": arm,
                    "conversations": len(found),
                    "steps": sum(it.steps for it in found),
                    "prompt_tokens": tokens.prompt,
                    **_rounded(tokens.shares()),
                    "tool_success": _round(fmean(it.score for it in found)),
                    "task_success": _round(fmean(it.answer for it in found)),
                    "ttft_s": _round(median(it.ttft_s / it.steps for it in found)),
                    "total_s": _round(median(it.total_s / it.steps for it in found)),
                    **_median("saved_over_none", savings(mine, arm, NONE)),
                    **_median("saved_over_prefix", savings(mine, arm, PREFIX)),
                }
            )
    return rows


def _single(told: Mapping[Key, Mapping[str, Conversation]]) -> list[Row]:
    """Every conversation, so that anybody can compare anew."""
    return [
        {
            "conversation": f"{kind} {trace} {number}",
            "under": arm,
            "seconds": _round(it.total_s),
            "first_seconds": _round(it.ttft_s),
            "right": _round(it.score),
            "computed": _round(it.tokens.shares()["work"]),
        }
        for (kind, trace, number), by_arm in told.items()
        for arm, it in by_arm.items()
    ]


def _by_share(taken: Sequence[Taken]) -> list[Row]:
    """How much sooner the first token is, by the share of the prompt that was found."""
    at = {(it.kind, it.trace, it.conversation, it.step, it.arm): it.answered for it in taken}
    points: dict[tuple[str, int], list[float]] = {}
    for (*where, arm), mine in at.items():
        base = at.get((*where, NONE))  # type: ignore[arg-type]
        if base is None or arm == NONE:
            continue
        found = 1 - mine.tokens.shares()["new"]
        group = int(np.searchsorted(_BINS[1:-1], found, side="right"))
        points.setdefault((arm, group), []).append(base.ttft_s / mine.ttft_s)
    return [
        {
            "speedup_of": arm,
            "found": f"{_BINS[group]:.2f} to {_BINS[group + 1]:.2f}",
            "requests": len(ratios),
            "ttft_speedup": _round(median(ratios)),
        }
        for (arm, group), ratios in sorted(points.items())
    ]


def _led(free: Sequence[Free]) -> list[Row]:
    """Conversations that the model led itself, by arm."""
    return [
        {
            "free": arm,
            "conversations": len(mine),
            "calls": sum(it.calls for it in mine),
            "calls_without_error": _round(
                sum(it.good_calls for it in mine) / max(1, sum(it.calls for it in mine))
            ),
            **_mean("task_success", [it.success for it in mine]),
            "seconds": _round(median(it.total_s for it in mine)),
        }
        for arm, mine in _by_arm(free).items()
    ]


def _reruns(texts: Mapping[str, Sequence[Sequence[str]]]) -> list[Row]:
    """How far the texts of a trace are apart from seed to seed, and from those without reuse."""
    rows = []
    for arm, traces in texts.items():
        bases = texts.get(NONE, [])
        apart = [
            fmean(scoring.levenshtein(*pair) for pair in zip(mine, base, strict=True))
            for mine, base in zip(traces, bases, strict=False)
        ]
        rows.append(
            {
                "reruns_of": arm,
                "traces": len(traces),
                "seeds": len(traces[0]),
                "levenshtein": _round(fmean(map(scoring.spread, traces))),
                "from_none_same_seed": _round(fmean(apart)) if apart else None,
            }
        )
    return rows


def _distances(apart: Sequence[Apart]) -> list[Row]:
    """Distance from full prefill, by arm."""
    rows = []
    for arm, mine in _by_arm(apart).items():
        first = [it.first_kl for it in mine]
        means = _means(mine, lambda it: it.answer_kl)
        low, high = statistics.bootstrap_interval(means) if len(means) > 1 else (None, None)
        tokens = sum((it.tokens for it in mine), Tokens())
        rows.append(
            {
                "distance_of": arm,
                "traces": len(means),
                "conversations": _conversations(mine),
                "steps": len(mine),
                "first_kl": _round(fmean(first)),
                "first_kl_p95": _round(float(np.quantile(first, 0.95))),
                "first_kl_max": _round(max(first)),
                "answer_kl": _round(fmean(it.answer_kl for it in mine)),
                "answer_kl_low": None if low is None else _round(low),
                "answer_kl_high": None if high is None else _round(high),
                "agreement": _round(fmean(it.agreement for it in mine)),
                "in_full": _round(fmean(it.in_full for it in mine)),
                "accepted": sum(it.accepted for it in mine),
                "rejected": sum(it.rejected for it in mine),
                **_rounded(tokens.shares()),
            }
        )
    return rows


def _success(paired: Sequence[Paired]) -> list[Row]:
    """How often steps are right beside full prefill, by arm: means of traces' means."""
    rows = []
    for arm, mine in _by_arm(paired).items():
        full, score = _scores(mine)
        low, high = statistics.difference_interval(score, full)
        rows.append(
            {
                "success_of": arm,
                "traces": len(full),
                "conversations": _conversations(mine),
                "steps": len(mine),
                "full": _round(fmean(full)),
                "right": _round(fmean(score)),
                "lost": _round(fmean(full) - fmean(score)),
                "lost_low": _round(-high),
                "lost_high": _round(-low),
                "right_in_full_only": sum(it.full > it.score for it in mine),
                "right_in_arm_only": sum(it.full < it.score for it in mine),
                "same": _round(fmean(it.same for it in mine)),
                **_rounded(sum((it.tokens for it in mine), Tokens()).shares()),
            }
        )
    return rows


def _summary(
    measured: Measured, told: Mapping[Key, Mapping[str, Conversation]]
) -> dict[str, float | str]:
    summary: dict[str, Any] = {}
    for base in by_trace.BASES:
        for what, amount in _AMOUNTS.items():
            values = savings(told, SIMILAR, base, amount)
            summary |= _median(f"{what}_saving_over_{base}", values)
    served = {key: it for key, it in told.items() if SIMILAR in it and NONE in it}
    full, similar = (
        by_trace.means((key, it[arm].score) for key, it in served.items())
        for arm in (NONE, SIMILAR)
    )
    both = list(served.values())
    if both:
        shares = sum((it[SIMILAR].tokens for it in both), Tokens()).shares()
        for name in (PREFIX, CONTENT, SIMILAR):
            tokens = sum((it[name].tokens for it in both if name in it), Tokens())
            if tokens.prompt:
                summary[f"work_{name}"] = _round(tokens.shares()["work"])
        summary |= {
            "traces": len(full),
            "conversations": len(both),
            "steps": sum(it[SIMILAR].steps for it in both),
            "success_full": _round(fmean(it[NONE].score for it in both)),
            "success_similar": _round(fmean(it[SIMILAR].score for it in both)),
            "similar_tokens_share": _round(shares["similar"]),
        }
    summary |= measured.similar.get("summary", {})
    pairs, right = (int(summary.pop(name, 0)) for name in ("pairs", "right_pairs"))
    apart = _by_arm(measured.apart)
    accepted = [it for it in apart.get(TESTED, []) if it.accepted]
    if accepted:
        boundary_kl = [it.first_kl for it in accepted]
        summary["boundary_kl_p95"] = _round(float(np.quantile(boundary_kl, 0.95)))
    paired = [it for it in measured.paired if it.arm == SIMILAR]
    scores = _scores(paired) if paired else (full, similar)
    saved = savings(told, SIMILAR, NONE)
    found = {
        "h1": verdicts.h1(saved, *scores),
        "h1_latency": verdicts.h1_latency(saved),
        "h2": verdicts.h2(_far(accepted)),
        "h3": verdicts.h3(right, pairs),
        "h4": verdicts.h4(_far(apart.get(TESTED) or apart.get(CLOSE, []))),
    }
    return summary | {name: str(verdict) for name, verdict in found.items()}


def _scores(paired: Sequence[Paired]) -> tuple[list[float], list[float]]:
    """Scores of full prefill and of an arm, trace by trace."""
    return _means(paired, lambda it: it.full), _means(paired, lambda it: it.score)


def _far(steps: Iterable[Apart]) -> list[float]:
    """Share of the first tokens that are far from full prefill's, trace by trace."""
    return _means(steps, lambda it: float(it.first_kl >= verdicts.MOST_KL))


def _means(steps: Iterable[Any], value: Callable[[Any], float]) -> list[float]:
    """Mean of each trace's steps."""
    return by_trace.means((_key(it), value(it)) for it in steps)


def _conversations(steps: Iterable[Any]) -> int:
    return len({_key(it) for it in steps})


def _key(step: Any) -> Key:
    return step.kind, step.trace, step.conversation


def _by_arm(items: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for it in items:
        found.setdefault(it.arm, []).append(it)
    return found


def _mean(name: str, scores: Sequence[float]) -> dict[str, float]:
    low, high = statistics.interval(scores)
    return {
        name: _round(fmean(scores)),
        f"{name}_low": _round(low),
        f"{name}_high": _round(high),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _round(value) for name, value in values.items()}


def _round(value: float) -> float:
    return round(float(value), DIGITS)
