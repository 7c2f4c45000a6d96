# SPDX-License-Identifier: Apache-2.0
"""Settings to try, what each does to a prompt's answer, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from segreuse_tools.calibrate.bounds import CERTAINTY, mean_at_most, share_at_least

ROUNDED = 1e-6
"""What a sum of probabilities in 32 bits may lack."""

Options = Mapping[str, Any]
T = TypeVar("T")

CANDIDATES: tuple[Options, ...] = (
    {"policy": "shift"},
    {"policy": "focus"},  # with the shares of its own
    *({"policy": "focus", "recompute_ratio": ratio} for ratio in (0.01, 0.05, 0.1, 0.2, 0.4)),
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
        agreement: share of the greedy tokens that are the same; 0 if the first is not.
        work: share of (token, layer) pairs computed.
        drift: as reported; None if the policy does not measure it.
    """

    divergence: float
    agreement: float
    work: float
    drift: float | None = None


class Setting(NamedTuple):
    """Options, and the trials of them, in the order of the prompts."""

    options: Options
    trials: Sequence[Trial]


class Found(NamedTuple):
    """What was tried.

    Attributes:
        settings: in the order of the table.
        about: what else is said of one of them, by its number.
        written: the server's options that stand for a setting.
    """

    settings: Sequence[Setting]
    about: Callable[[int], str]
    written: Callable[[Options], Options] = dict


@dataclass(frozen=True)
class Verdict:
    """What trials say of a setting.

    Attributes:
        work: mean.
        divergence, divergence_at_most: mean, and its upper bound at 95 % (one-sided; Student's).
        divergence_median, divergence_p90: see `p90`.
        agreement, agreement_at_least: share of prompts with the same first token, and its lower
            bound (exact, after Clopper and Pearson).
        tokens: mean share of greedy tokens that are the same.
    """

    work: float
    divergence: float
    divergence_at_most: float
    divergence_median: float
    divergence_p90: float
    agreement: float
    agreement_at_least: float
    tokens: float

    def keeps(self, max_divergence: float, min_agreement: float) -> bool:
        """Whether both bounds are within the limits."""
        return (
            self.divergence_at_most <= max_divergence and self.agreement_at_least >= min_agreement
        )


def divergence(full: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Kullback-Leibler divergence of `other` from `full`, in nats.

    Args:
        full, other: log-probabilities by token. Where only the most likely ones are known, it is a
            lower bound: that of a coarser distribution. Tokens known in both stay apart; all others
            are one, or two where `other` can have no more of those that only `full` knows than its
            least likely share each.
            Infinite where one of them is no number: an engine that computes such agrees with none.
    """
    if any(map(math.isnan, (*full.values(), *other.values()))):
        return math.inf
    both = full.keys() & other.keys()
    bins = [(math.exp(full[token]), full[token] - other[token]) for token in both]
    known = math.fsum(math.exp(full[token]) for token in both)
    ours = math.fsum(math.exp(p) for token, p in full.items() if token not in both)
    rest = max(0.0, 1 - known - ours)
    left = max(0.0, 1 - math.fsum(math.exp(other[token]) for token in both))
    most = (len(full) - len(both)) * math.exp(min(other.values()))
    theirs = min(most, left * ours / (ours + rest)) if ours else 0.0
    for share, in_other in ((ours, theirs), (rest, left - theirs)):
        bins.append((share, math.log((share or 1.0) / max(in_other, ROUNDED))))
    return max(0.0, math.fsum(share * ratio for share, ratio in bins if share > 1e-20))


def agreement(full: Sequence[int], other: Sequence[int]) -> float:
    """Share of the tokens of `full` that `other` has, too, up to the first that differs."""
    pairs = zip(full, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(full)


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
    agreeing = sum(trial.agreement > 0 for trial in trials)
    return Verdict(
        work=fmean(trial.work for trial in trials),
        divergence=fmean(divergences),
        divergence_at_most=mean_at_most(divergences),
        divergence_median=median(divergences),
        divergence_p90=p90(trials),
        agreement=agreeing / len(trials),
        agreement_at_least=share_at_least(agreeing, len(trials)),
        tokens=fmean(trial.agreement for trial in trials),
    )


def p90(trials: Sequence[Trial]) -> float:
    """The least divergence that nine in ten of the trials do not exceed."""
    return sorted(trial.divergence for trial in trials)[math.ceil(len(trials) * 9 / 10) - 1]


def halves(trials: Sequence[Trial]) -> tuple[Sequence[Trial], Sequence[Trial]]:
    """Those that a setting is chosen by, and those that check it: no prompt is in both.

    Who has chosen among many settings cannot check the choice: the luckiest looks better than it
    is.
    """
    half = len(trials) // 2
    return trials[:half], trials[half:]


def too_few(count: int, min_agreement: float) -> str:
    """A note that so many prompts cannot keep the bound, however alike the answers to them are;
    empty: they can.

    Args:
        count: of the prompts, at least 2.
        min_agreement: below 1.
    """
    half = count // 2
    proven = share_at_least(half, half)
    if proven >= min_agreement:
        return ""
    needed = math.ceil(math.log(1 - CERTAINTY) / math.log(min_agreement))
    return (
        f"no setting will be written: with {count} prompts, of which {half} choose the setting, an "
        f"agreement of {proven:.3f} is the most that can be proven, and --min-agreement is "
        f"{min_agreement}; {2 * needed} prompts are the least that can prove it"
    )


def cheapest(
    settings: Sequence[Setting], max_divergence: float, min_agreement: float
) -> int | None:
    """Number of the setting that is chosen by the half of the prompts that chooses; None: none."""
    judged = [judge(halves(setting.trials)[0]) for setting in settings]
    chosen = choose(enumerate(judged), max_divergence, min_agreement)
    return None if chosen is None else chosen[0]


def choose(
    verdicts: Iterable[tuple[T, Verdict]], max_divergence: float, min_agreement: float
) -> tuple[T, Verdict] | None:
    """The setting of least work whose bounds are within the limits; None if there is none."""
    within = [pair for pair in verdicts if pair[1].keeps(max_divergence, min_agreement)]
    return min(within, key=lambda pair: pair[1].work, default=None)
