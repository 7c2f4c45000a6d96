# SPDX-License-Identifier: Apache-2.0
"""From outcomes to figures: rows by task and policy, and what a run comes to.

Every policy is compared with full prefill on the same examples. All these comparisons, and those of
the summary, are one family: `p_holm` is corrected for all of them together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from bench.harness import Row
from bench.quality import statistics
from bench.quality.engine import FULL, Arm, Outcome
from bench.quality.tasks import RULER, Example
from segreuse_tools.calibrate.search import divergence, most_likely

Answers = Sequence[Mapping[str, Outcome]]
Results = dict[str, list[tuple[Example, dict[str, Outcome]]]]
Summary = dict[str, float | str]

DIGITS = 4
PAIRS = {
    "best_against_hybrid": ("best", "hybrid"),
    "hybrid_against_sparsex": ("hybrid", "sparsex"),
    "focus_against_prophet": ("focus 0.5 %", "prophet 0.5 %"),
}
"""What else is compared, on the pooled RULER tasks: the last at the same small number of tokens."""


def figures(results: Results, arms: Sequence[Arm]) -> tuple[list[Row], Summary]:
    """Rows and summary of a run.

    Raises:
        ValueError: no results.
    """
    rows = [_row(task, arm, found) for task, found in _groups(results).items() for arm in arms]
    compared = [row for row in rows if row["policy"] != FULL.name]
    summary, among_policies = _summary(results, arms)
    corrected = statistics.holm(
        [row["p_against_full"] for row in compared] + list(among_policies.values())
    )
    for row, p in zip(compared, corrected[: len(compared)], strict=True):
        row |= {"p_against_full": shown_p(row["p_against_full"]), "p_holm": shown_p(p)}
        row["comparisons"] = len(corrected)
        row["verdict"] = verdict(row)
    for key, p in zip(among_policies, corrected[len(compared) :], strict=True):
        summary |= {f"p_{key}": shown_p(among_policies[key]), f"p_{key}_holm": shown_p(p)}
    return rows, summary | {"comparisons": len(corrected), "margin": statistics.MARGIN}


def verdict(row: Row) -> str:
    """What the comparison of a row with full prefill says, in words.

    `lower` and `higher` where the corrected p is below 0.05; `equivalent` where the interval lies
    within the margin; both may hold of a small loss. `open`: neither was shown.
    """
    said = []
    if row["p_holm"] < 1 - statistics.CONFIDENCE:
        said.append("lower" if row["difference"] < 0 else "higher")
    if statistics.equivalent((row["difference_low"], row["difference_high"])):
        said.append("equivalent")
    return ", ".join(said) or "open"


def shown_p(p: float) -> float:
    """To two digits: a small p is not rounded to 0."""
    return float(f"{p:.2g}")


def _groups(results: Results) -> dict[str, Answers]:
    """Answers by what a row is about: each task, its kinds, and the four RULER tasks together."""
    groups: dict[str, Answers] = {}
    for task, asked in results.items():
        groups[task] = [answers for _, answers in asked]
        by_kind = defaultdict(list)
        for drawn, answers in asked:
            by_kind[drawn.kind].append(answers)
        if len(by_kind) > 1:
            groups |= {f"{task}, {kind}": by_kind[kind] for kind in sorted(by_kind)}
    if all(task in results for task in RULER):
        groups["RULER"] = [answers for task in RULER for _, answers in results[task]]
    return groups


def _scores(answers: Answers, arm: str) -> list[float]:
    return [by_arm[arm].score for by_arm in answers]


def _row(task: str, arm: Arm, answers: Answers) -> Row:
    mine = [by_arm[arm.name] for by_arm in answers]
    scores = _scores(answers, arm.name)
    low, high = statistics.interval(scores)
    row: Row = {
        "task": task,
        "policy": arm.name,
        "samples": len(mine),
        "accuracy": round(fmean(scores), DIGITS),
        "low": round(low, DIGITS),
        "high": round(high, DIGITS),
    }
    if arm.options is not None:
        full = [by_arm[FULL.name] for by_arm in answers]
        row |= _against_full(scores, _scores(answers, FULL.name))
        row |= _first_token(mine, full)
    row["work"] = round(fmean(outcome.work for outcome in mine), DIGITS)
    row["ttft_ms"] = round(median(outcome.ttft_ms for outcome in mine), 2)
    return row


def _against_full(scores: list[float], full: list[float]) -> Row:
    low, high = statistics.difference_interval(scores, full)
    return {
        "difference": round(fmean(scores) - fmean(full), DIGITS),
        "difference_low": round(low, DIGITS),
        "difference_high": round(high, DIGITS),
        "differing": statistics.differing(scores, full),
        "p_against_full": statistics.paired_p(scores, full),
    }


def _first_token(mine: Sequence[Outcome], full: Sequence[Outcome]) -> Row:
    """How far the first word of the answer is from the one of full prefill."""
    pairs = list(zip(full, mine, strict=True))
    apart = [divergence(one.first, other.first) for one, other in pairs]
    agree = [float(most_likely(one.first) == most_likely(other.first)) for one, other in pairs]
    kl_low, kl_high = statistics.bootstrap_interval(apart)
    low, high = statistics.interval(agree)
    return {
        "first_token_kl": round(fmean(apart), 5),
        "kl_low": None if kl_low is None else round(kl_low, 5),
        "kl_high": None if kl_high is None else round(kl_high, 5),
        "top1_agreement": round(fmean(agree), DIGITS),
        "top1_low": round(low, DIGITS),
        "top1_high": round(high, DIGITS),
    }


def _summary(results: Results, arms: Sequence[Arm]) -> tuple[Summary, dict[str, float]]:
    """The summary without its p-values, and these, by what was compared."""
    tasks = [task for task in RULER if task in results] or list(results)
    answers = [by_arm for task in tasks for _, by_arm in results[task]]
    means = {
        arm.name: fmean(
            fmean(by_arm[arm.name].score for _, by_arm in results[task]) for task in tasks
        )
        for arm in arms
    }
    work = {arm.name: fmean(by_arm[arm.name].work for by_arm in answers) for arm in arms}
    reusing = [arm.name for arm in arms if arm.options is not None]
    best = best_policy(answers, reusing, means, work)
    summary: Summary = {name: round(mean, DIGITS) for name, mean in means.items()}
    summary |= {
        "best": round(means[best], DIGITS),
        "best_policy": best,
        "best_work": round(work[best], DIGITS),
        "samples_per_task": min(len(results[task]) for task in tasks),
    }
    if "hybrid" in work:
        summary["hybrid_work"] = round(work["hybrid"], DIGITS)
    p_values = {}
    for key, pair in PAIRS.items():
        names = [best if name == "best" else name for name in pair]
        if set(names) <= set(reusing):
            first, second = (_scores(answers, name) for name in names)
            low, high = statistics.difference_interval(first, second)
            p_values[key] = statistics.paired_p(first, second)
            summary |= {
                key: round(fmean(first) - fmean(second), DIGITS),
                f"{key}_low": round(low, DIGITS),
                f"{key}_high": round(high, DIGITS),
            }
    return summary, p_values


def best_policy(
    answers: Answers,
    policies: Sequence[str],
    means: Mapping[str, float],
    work: Mapping[str, float],
) -> str:
    """The least work among the policy of the highest mean and those equivalent to it.

    It is chosen by the figures that it is then reported with: read `best_against_hybrid` as a hint.
    """
    top = max(policies, key=lambda name: (means[name], -work[name]))
    equals = [
        name
        for name in policies
        if name == top
        or statistics.equivalent(
            statistics.difference_interval(_scores(answers, name), _scores(answers, top))
        )
    ]
    return min(equals, key=work.__getitem__)
