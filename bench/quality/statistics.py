# SPDX-License-Identifier: Apache-2.0
"""How sure a figure is: intervals of means, and tests of paired differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

RESAMPLES = 9999


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean, by bootstrap.

    Raises:
        ValueError: no scores.
    """
    values = np.asarray(scores, dtype=float)
    if not len(values):
        raise ValueError("no scores to take an interval of")
    if len(values) == 1 or (values == values[0]).all():
        return float(values[0]), float(values[0])
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    )
    low, high = found.confidence_interval
    return float(low), float(high)


def paired_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Chance of so large a mean difference (two-sided) if signs of the differences were random."""
    difference = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if len(difference) < 2 or not difference.any():
        return 1.0
    return float(
        stats.permutation_test(
            (difference,),
            np.mean,
            permutation_type="samples",
            n_resamples=RESAMPLES,
            rng=np.random.default_rng(0),
        ).pvalue
    )
