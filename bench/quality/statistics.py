# SPDX-License-Identifier: Apache-2.0
"""How sure a figure is: intervals of means, tests of paired differences, and their correction.

Nothing here takes the spread of few scores for the whole truth: where 200 of 200 answers are right,
the interval still says how often a wrong one may come that was not among the 200.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

CONFIDENCE = 0.95
MARGIN = 0.02
"""Two accuracies are called equivalent where the interval of their difference is within this.

Fixed before the figures were seen: a loss of one answer in fifty is one that a user may notice.
"""
RESAMPLES = 99_999
_SHUFFLE = 0
_LARGEST_BET = 0.99
_MOST_ITEMS = 120
"""Scores are counted in units of one item of at most so many."""
_ROUNDING = 1e-6
"""By how much a difference of two scores is off that are kept with six digits, at most."""

FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]


def interval(scores: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Interval of the mean of scores from 0 to 1; it never has width 0.

    Scores that are all 0 or 1 are shares: the interval is Clopper and Pearson's (Biometrika 26,
    1934), exact for every share and number. Scores between (three of four words right) are not:
    words of one answer go wrong together, so neither may words be counted, nor may the spread of
    scores that happen to be equal be trusted. Their interval is that of `bounded_interval`.

    Raises:
        ValueError: no scores, or one that is not from 0 to 1.
    """
    values = _checked(scores, 0.0, 1.0)
    if np.isin(values, (0, 1)).all():
        found = stats.binomtest(int(values.sum()), len(values)).proportion_ci(confidence, "exact")
        return float(found.low), float(found.high)
    return bounded_interval(values, 0.0, 1.0, confidence)


def difference_interval(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Interval of the mean of `first - second`, pair by pair; scores are from 0 to 1.

    Raises:
        ValueError: no scores, one out of range, or not as many of both.
    """
    difference = _paired(_checked(first, 0.0, 1.0), _checked(second, 0.0, 1.0))
    return bounded_interval(difference, -1.0, 1.0, confidence)


def bounded_interval(
    values: Sequence[float] | FloatArray,
    least: float,
    most: float,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Interval of the mean of independent values between `least` and `most`, and of nothing else.

    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 86,
    2024): whoever bets, value by value, that the mean is above `m` hardly ever multiplies the stake
    by `2 / (1 - confidence)` if it is `m`, whatever the distribution (Ville's inequality). The
    interval holds every `m` against which neither side won so much. It covers the mean at least as
    often as it says for any number of values, narrows where they vary little, and for equal values
    is about as wide as Clopper and Pearson's. The bets depend on the order, which is shuffled once
    for all (fixed seed). Where values come in strata of fixed size (tasks), their mean varies less
    than that of independent draws would, so the interval is wide enough for them, too.

    Raises:
        ValueError: no values, or one that is out of range.
    """
    scaled = (_checked(values, least, most) - least) / (most - least)
    scaled = np.clip(np.random.default_rng(_SHUFFLE).permutation(scaled), 0.0, 1.0)
    stake = math.log(2 / (1 - confidence))
    low, high = _lower_bound(scaled, stake), 1 - _lower_bound(1 - scaled, stake)
    return least + (most - least) * low, least + (most - least) * high


def bootstrap_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """Interval of the mean of values that have no upper bound, by bootstrap (BCa; Efron 1987).

    Approximate, and blind to what is so rare that it is not among the values: no method can know
    better without a bound (Bahadur and Savage 1956). None twice where all values are equal, from
    which it can tell nothing.

    Raises:
        ValueError: no values.
    """
    numbers = _checked(values, -math.inf, math.inf)
    if (numbers == numbers[0]).all():
        return None, None
    found = stats.bootstrap(
        (numbers,),
        np.mean,
        n_resamples=2000,
        confidence_level=confidence,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def paired_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Chance, two-sided, of so large a mean difference if the sign of every difference were random.

    Exact where scores are shares of few items, six digits of them at least: the distribution of the
    sum over all signs is counted out (for scores of 0 and 1 that is McNemar's exact test). Its
    smallest value is 2^(1 - d) where d pairs differ (`differing`). Of other values 99,999 draws of
    signs are tried, and it is never below 0.00002.

    Raises:
        ValueError: no scores, or not as many of both.
    """
    difference = _paired(
        _checked(first, -math.inf, math.inf), _checked(second, -math.inf, math.inf)
    )
    difference = difference[np.abs(difference) > 1e-12]
    if len(difference) < 2:
        return 1.0  # the sign of one difference says nothing
    for items in range(1, _MOST_ITEMS + 1):
        units = np.rint(difference * items)
        # What is rounded off must not make sums differ that are equal.
        if units.all() and np.allclose(difference, units / items, rtol=0, atol=_ROUNDING):
            return _sign_flip_p(units.astype(np.int64))
    found = stats.permutation_test(
        (difference,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def differing(first: Sequence[float], second: Sequence[float]) -> int:
    """How many pairs differ: what a paired test rests on."""
    return int((np.abs(_paired(np.asarray(first), np.asarray(second))) > 1e-12).sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p corrected for how many there are (Holm, Scand. J. Statistics 6, 1979), in their order.

    To call those below 0.05 different is wrong about any of them in at most one of twenty families.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    ascending = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(ascending):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def equivalent(difference: Interval, margin: float = MARGIN) -> bool:
    """Whether an interval of a difference lies within the margin on both sides.

    With an interval of 95 % that is two one-sided tests (Schuirmann 1987) at 2.5 % each. That a
    difference was not found significant says nothing of the kind.
    """
    low, high = difference
    return -margin < low and high < margin


def _sign_flip_p(units: npt.NDArray[np.int64]) -> float:
    """Share of the 2^n choices of signs whose sum is as far from 0 as the one of `units`."""
    sizes = np.abs(units)
    middle = int(sizes.sum())
    chance = np.zeros(2 * middle + 1)
    chance[middle] = 1.0
    for size in sizes:
        flipped = np.zeros_like(chance)
        flipped[size:] += chance[:-size] / 2
        flipped[:-size] += chance[size:] / 2
        chance = flipped
    reached = abs(int(units.sum()))
    if reached == 0:
        return 1.0
    return min(1.0, 2 * float(chance[middle + reached :].sum()))


def _lower_bound(values: FloatArray, stake: float) -> float:
    """Largest mean below which bets on more win `exp(stake)`; values are from 0 to 1."""
    number = len(values)
    counted = np.arange(2, number + 2)
    mean = (0.5 + values.cumsum()) / counted
    variance = (0.25 + ((values - mean) ** 2).cumsum()) / counted
    known = np.concatenate(([0.25], variance[:-1]))  # a bet may know only the values before it
    bets = np.sqrt(2 * stake / (number * known))

    def won(supposed: float) -> float:
        gains = np.log1p(np.minimum(bets, _LARGEST_BET / supposed) * (values - supposed))
        return float(gains.cumsum().max()) - stake

    smallest = 1e-9
    if won(smallest) < 0:
        return 0.0
    # What a bet wins falls with the mean that it is laid against: there is one root.
    return float(optimize.brentq(won, smallest, 1.0, xtol=1e-9))


def _paired(first: FloatArray, second: FloatArray) -> FloatArray:
    if len(first) != len(second):
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    return first - second


def _checked(values: Sequence[float] | FloatArray, least: float, most: float) -> FloatArray:
    array = np.asarray(values, dtype=float)
    if not len(array):
        raise ValueError("no scores to take an interval of")
    wrong = array[~((array >= least - 1e-12) & (array <= most + 1e-12))]
    if len(wrong):
        raise ValueError(f"a score of {wrong[0]} is not between {least:g} and {most:g}")
    return array
