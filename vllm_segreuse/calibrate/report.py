# SPDX-License-Identifier: Apache-2.0
"""What the command prints: a table of settings, and what drift says about the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from vllm_segreuse.calibrate import drift
from vllm_segreuse.calibrate.search import Setting, Trial, Verdict, halves, p90

HEADER = (
    f"{'setting':48}{'work':>7}{'KL':>8}{'at most':>9}{'median':>8}{'p90':>8}"
    f"{'first':>7}{'at least':>10}{'tokens':>8}"
)
LEGEND = (
    "KL: divergence of the first token from full prefill, in nats; first: share of prompts with "
    "the same first token; tokens: share of greedy tokens that are the same. Bounds are at 95 %."
)


def about_drift(trials: Sequence[Trial], target: float) -> str:
    """How well drift ranks prompts, and what a `max_drift` would do on the half that checks."""
    choosing, checking = halves(trials)
    limit = drift.largest_drift(choosing, target)
    if limit is None:
        return "drift is not measured by this policy"
    correlation = drift.rank_correlation(trials)
    in_full = fmean(drift.is_above(trial, limit) for trial in checking)
    return (
        f"drift has rank correlation {'-' if correlation is None else format(correlation, '.2f')} "
        f"with KL; max_drift {limit:g} is for a p90 of KL up to {target:g}: on the prompts it was "
        f"not chosen by, p90 {p90(drift.limited(checking, limit)):.4f}, {in_full:.1%} in full"
    )


def name_of(setting: Setting) -> str:
    """A setting in the table's first column."""
    policy, *others = setting.options.items()
    return " ".join([policy[1], *(f"{key}={value}" for key, value in others)])


def row(name: str, verdict: Verdict) -> str:
    """A line below `HEADER`."""
    return (
        f"{name:48}{verdict.work:>7.3f}{verdict.divergence:>8.4f}"
        f"{verdict.divergence_at_most:>9.4f}{verdict.divergence_median:>8.4f}"
        f"{verdict.divergence_p90:>8.4f}{verdict.agreement:>7.3f}"
        f"{verdict.agreement_at_least:>10.3f}{verdict.tokens:>8.3f}"
    )
