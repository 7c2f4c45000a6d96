# SPDX-License-Identifier: Apache-2.0
"""The bounds against scipy, at the edges too, and against what they promise."""

import math

import pytest
from scipy import stats

from segreuse_tools.calibrate.bounds import mean_at_most, share_at_least, student_quantile


@pytest.mark.parametrize("count", [1, 2, 3, 10, 57, 500, 3000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("certainty", [0.9, 0.95, 0.999])
def test_a_share_has_the_bound_of_clopper_and_pearson(count, share, certainty):
    successes = round(share * count)
    expected = stats.binomtest(successes, count, alternative="greater")
    expected = expected.proportion_ci(certainty, "exact").low
    assert share_at_least(successes, count, certainty) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("count", [1, 5, 10, 40])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.74, 0.9, 0.97, 0.999, 1.0])
def test_the_bound_holds_in_95_of_100_samples_whatever_the_share_is(count, share):
    chances = stats.binom.pmf(range(count + 1), count, share)
    holds = sum(p for k, p in enumerate(chances) if share_at_least(k, count) <= share)
    assert holds >= 0.95 - 1e-9


def test_nothing_is_proven_by_a_sample():
    assert share_at_least(10, 10) == pytest.approx(0.05 ** (1 / 10))
    assert share_at_least(0, 10) == 0.0
    assert all(share_at_least(n, n) < 1 for n in (1, 10, 1000))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 199, 1000])
@pytest.mark.parametrize("certainty", [0.6, 0.95, 0.999])
def test_students_quantile_is_that_of_scipy(freedom, certainty):
    expected = stats.t.ppf(certainty, freedom)
    assert student_quantile(certainty, freedom) == pytest.approx(expected, rel=1e-7)


def test_a_mean_has_students_bound():
    values = [0.1, 0.4, 0.2, 0.0, 0.3]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9).high
    assert mean_at_most(values) == pytest.approx(expected)


@pytest.mark.parametrize("values", [[], [0.0], [0.1, math.inf], [0.1, math.nan]])
def test_a_mean_of_too_little_has_no_bound(values):
    assert mean_at_most(values) == math.inf
