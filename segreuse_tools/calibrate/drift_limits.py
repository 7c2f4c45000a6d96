# SPDX-License-Identifier: Apache-2.0
"""`max_drift`: which requests to compute in full after all, so that few are far off."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from statistics import StatisticsError, correlation

from segreuse_tools.calibrate.search import Setting, Trial, halves, p90


def rank_correlation(trials: Sequence[Trial]) -> float | None:
    """Spearman's correlation of drift with divergence; None if it is not defined.

    It is not where drift was not measured, or where one of the two is the same in all trials.
    """
    measured = [(trial.drift, trial.divergence) for trial in trials if trial.drift is not None]
    drifts, divergences = [one for one, _ in measured], [other for _, other in measured]
    try:
        return correlation(_ranks(drifts), _ranks(divergences))
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[int]:
    """Twice the mean rank: equal values share it."""
    ordered = sorted(values)
    return [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]


def is_above(trial: Trial, max_drift: float) -> bool:
    """Whether the request would be computed in full."""
    return trial.drift is not None and trial.drift > max_drift


def limited(trials: Sequence[Trial], max_drift: float) -> list[Trial]:
    """The trials as they would be with `max_drift`.

    A request above it is computed in full once its drift is known: that work comes on top, and its
    answer is that of full prefill.
    """
    return [
        replace(trial, divergence=0.0, agreement=1.0, work=trial.work + 1)
        if is_above(trial, max_drift)
        else trial
        for trial in trials
    ]


def largest_drift(trials: Sequence[Trial], target: float) -> float | None:
    """The largest `max_drift` with which the p90 of the divergence is at most `target`.

    Returns:
        One of the drifts measured, or 0 if each of them is too large; None: none was measured.
    """
    drifts = sorted({trial.drift for trial in trials if trial.drift is not None}, reverse=True)
    if not drifts:
        return None
    return next((drift for drift in drifts if p90(limited(trials, drift)) <= target), 0.0)


def with_max_drift(setting: Setting, target: float) -> Setting:
    """The setting with a `max_drift` of its own, by the half that settings are chosen by.

    Policies that do not measure drift stay as they are.
    """
    limit = largest_drift(halves(setting.trials)[0], target)
    if limit is None:
        return setting
    return Setting({**setting.options, "max_drift": limit}, limited(setting.trials, limit))
