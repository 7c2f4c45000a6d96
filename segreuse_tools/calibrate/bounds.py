# SPDX-License-Identifier: Apache-2.0
"""One-sided confidence bounds of a share and of a mean, by the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

CERTAINTY = 0.95


def share_at_least(successes: int, count: int, certainty: float = CERTAINTY) -> float:
    """Exact lower bound of a share (Clopper and Pearson, 1934).

    The largest share under which so many successes, or more, are no likelier than 1 - `certainty`.
    Exact also at the edges: ten of ten prove 0.741, none of ten prove nothing.
    """
    if successes == 0:
        return 0.0
    return _root(lambda share: _tail(successes, count, share) - (1 - certainty), 0.0, 1.0)


def mean_at_most(values: Sequence[float], certainty: float = CERTAINTY) -> float:
    """Student's upper bound of a mean; infinite for one value, or where one is not finite.

    It is exact for normal values, and an approximation for others, the better the more there are.
    Of equal values it is their value: what has not been seen once, no bound of a mean can tell.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.inf
    error = stdev(values) / math.sqrt(len(values))
    return fmean(values) + student_quantile(certainty, len(values) - 1) * error


def student_quantile(certainty: float, freedom: int) -> float:
    """The value that Student's t stays below with this probability (over one half)."""
    # In terms of the angle it is a power of the cosine that is summed: no value is out of reach.
    angle = _root(lambda a: 0.5 + _student(a, freedom) / 2 - certainty, 0.0, math.pi / 2)
    return math.sqrt(freedom) * math.tan(angle)


def _student(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) tan(angle)); Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if freedom % 2:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


def _tail(successes: int, count: int, share: float) -> float:
    """P(at least so many successes) of a binomial distribution."""
    if not 0 < share < 1:
        return float(share == 1)
    logs = (
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(share)
        + (count - k) * math.log1p(-share)
        for k in range(successes, count + 1)
    )
    return math.fsum(map(math.exp, logs))


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return low
