# SPDX-License-Identifier: Apache-2.0
"""`max_drift`: the rank correlation, the limit, and what trials would be with it."""

import math
from random import Random

import pytest
from scipy import stats

from segreuse_tools.calibrate.drift_limits import (
    largest_drift,
    limited,
    rank_correlation,
    with_max_drift,
)
from segreuse_tools.calibrate.search import Setting, Trial, p90


def trial(drift: float | None, divergence: float) -> Trial:
    return Trial(divergence, agreement=0.5, work=0.2, drift=drift)


def test_correlation_is_spearmans():
    rng = Random(1)
    pairs = [(rng.randrange(6) / 2, rng.randrange(5) / 4) for _ in range(30)]  # many ties
    expected = stats.spearmanr(*zip(*pairs, strict=True)).statistic
    unmeasured = [trial(None, 9.0)]
    found = rank_correlation([*unmeasured, *(trial(*pair) for pair in pairs)])
    assert found == pytest.approx(expected)
    assert rank_correlation([trial(1.0, 0.1), trial(2.0, math.inf), trial(3.0, math.inf)]) > 0.8


@pytest.mark.parametrize(
    "trials",
    [[], [trial(1.0, 0.1)], [trial(None, 0.1)] * 3, [trial(1.0, 0.1), trial(1.0, 0.2)]],
)
def test_correlation_is_not_always_defined(trials: list[Trial]):
    assert rank_correlation(trials) is None


def test_what_is_above_the_limit_is_full_prefill_and_costs_that_on_top():
    near, far, unmeasured = trial(1.0, 0.3), trial(1.1, 0.4), trial(None, 0.5)
    assert limited([near, far, unmeasured], 1.0) == [
        near,
        Trial(divergence=0.0, agreement=1.0, work=1.2, drift=1.1),
        unmeasured,
    ]


def test_the_limit_is_the_largest_that_keeps_the_target():
    # The three of largest drift are off: two of 20 may be.
    trials = [trial(float(number), 1.0 if number > 17 else 0.0) for number in range(1, 21)]
    assert p90(trials) == 1.0
    assert largest_drift(trials, 0.1) == 19.0
    assert p90(limited(trials, 19.0)) == 0.0
    assert largest_drift(trials, 1.0) == 20.0, "none has to be computed in full"


def test_a_limit_that_nothing_keeps_is_zero_and_none_where_nothing_was_measured():
    assert largest_drift([trial(1.0, 0.5), trial(2.0, 0.5)], 0.1) == 0.0
    assert largest_drift([trial(None, 0.5)] * 2, 0.1) is None
    setting = Setting({"policy": "shift"}, [trial(None, 0.5)] * 2)
    assert with_max_drift(setting, 0.1) is setting


def test_the_limit_is_chosen_by_one_half_and_holds_for_both():
    choosing, checking = [trial(1.0, 0.0), trial(3.0, 1.0)], [trial(2.0, 1.0), trial(0.5, 1.0)]
    found = with_max_drift(Setting({"policy": "focus"}, [*choosing, *checking]), 0.1)
    assert found.options == {"policy": "focus", "max_drift": 1.0}
    assert [one.divergence for one in found.trials] == [0.0, 0.0, 0.0, 1.0]
