# SPDX-License-Identifier: Apache-2.0
"""Settings to try, what each does to a prompt's answer, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vllm_segreuse.calibrate.bounds import mean_at_most, share_at_least

Options = Mapping[str, Any]

CANDIDATES: tuple[Options, ...] = (
    {"policy": "shift"},
    *({"policy": "focus", "recompute_ratio": ratio} for ratio in (0.01, 0.05, 0.1, 0.2)),
    *({"policy": "prophet", "recompute_ratio": ratio} for ratio in (0.01, 0.05, 0.1, 0.2)),
    *(
        {"policy": "sparsex", "dense_layers": dense, "recompute_ratio": ratio}
        for dense in (0, 0.1, 0.2, 0.35)
        for ratio in (0.05, 0.15)
    ),
)


@dataclass(frozen=True)
class Trial:
    """One prompt under one setting, against full prefill.

    Attributes:
        divergence: Kullback-Leibler divergence of the first token, in nats.
        agrees: the most likely first token is the same.
        work: share of (token, layer) pairs computed.
    """

    divergence: float
    agrees: bool
    work: float


@dataclass(frozen=True)
class Verdict:
    """What trials say of a setting.

    Attributes:
        divergence, divergence_at_most: mean, and its upper bound at 95 % (one-sided; Student's).
        agreement, agreement_at_least: share, and its lower bound (exact, after Clopper and
            Pearson).
        work: mean.
    """

    divergence: float
    divergence_at_most: float
    agreement: float
    agreement_at_least: float
    work: float

    def keeps(self, max_divergence: float, min_agreement: float) -> bool:
        """Whether both bounds are within the limits."""
        return (
            self.divergence_at_most <= max_divergence and self.agreement_at_least >= min_agreement
        )


def divergence(full: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Kullback-Leibler divergence of `other` from `full`, in nats.

    Args:
        full, other: log-probabilities by token. Where only the most likely ones are known, a token
            that `other` lacks counts as its least likely: the result is a lower bound.
            Infinite where one of them is no number: an engine that computes such agrees with none.
    """
    if any(map(math.isnan, (*full.values(), *other.values()))):
        return math.inf
    floor = min(other.values())
    return max(
        0.0,
        sum(math.exp(p) * (p - other.get(token, floor)) for token, p in full.items() if p > -50),
    )


def most_likely(logprobs: Mapping[int, float]) -> int:
    """The token with the largest log-probability."""
    return max(logprobs, key=logprobs.__getitem__)


def judge(trials: Sequence[Trial]) -> Verdict:
    """Means and one-sided 95 % bounds.

    Raises:
        ValueError: no trials.
    """
    if not trials:
        raise ValueError("no trials to judge a setting by")
    divergences = [trial.divergence for trial in trials]
    agreeing = sum(trial.agrees for trial in trials)
    return Verdict(
        fmean(divergences),
        mean_at_most(divergences),
        agreeing / len(trials),
        share_at_least(agreeing, len(trials)),
        fmean(trial.work for trial in trials),
    )


def halves(trials: Sequence[Trial]) -> tuple[Sequence[Trial], Sequence[Trial]]:
    """Those that a setting is chosen by, and those that check it: no prompt is in both.

    Who has chosen among many settings cannot check the choice: the luckiest looks better than it
    is.
    """
    half = len(trials) // 2
    return trials[:half], trials[half:]


def choose(
    verdicts: Iterable[tuple[Options, Verdict]], max_divergence: float, min_agreement: float
) -> tuple[Options, Verdict] | None:
    """The setting of least work whose bounds are within the limits; None if there is none."""
    within = [
        (options, verdict)
        for options, verdict in verdicts
        if verdict.keeps(max_divergence, min_agreement)
    ]
    return min(within, key=lambda pair: pair[1].work, default=None)
