# SPDX-License-Identifier: Apache-2.0
"""Intervals cover what they say, at the edges too; tests of pairs count pairs."""

from itertools import product
from math import comb

import numpy as np
import pytest

from bench.english import records
from bench.quality import statistics

pytestmark = pytest.mark.slow  # intervals, over many draws

WORDS = 4


def coverage(truth: float, number: int, clustered: bool) -> float:
    """Share of 200 samples of mean `truth` whose interval holds it.

    `clustered`: half of the examples go wrong as a whole, the others word by word.
    """
    draw = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        whole = (draw.random(number) < truth).astype(float)
        words = (draw.random((number, WORDS)) < truth).mean(1)
        scores = np.where(draw.random(number) < 0.5, whole, words) if clustered else whole
        low, high = statistics.interval(scores.tolist())
        held += low <= truth <= high
    return held / 200


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("number", [4, 100])
@pytest.mark.parametrize("truth", [0, 0.01, 0.5, 0.99, 1])
def test_intervals_cover_the_mean_as_often_as_they_say(
    truth: float, number: int, clustered: bool
) -> None:
    assert coverage(truth, number, clustered) >= 0.94


def test_equal_scores_are_not_certainty() -> None:
    for number in (1, 2, 10, 200):
        low, high = statistics.interval([1.0] * number)
        # Exact: the share under which `number` right answers in a row come once in forty times.
        assert low == pytest.approx(0.025 ** (1 / number))
        assert high == 1
        assert statistics.interval([0.0] * number) == pytest.approx((0, 1 - low))
        low, high = statistics.interval([2 / 3] * number)
        assert low < 2 / 3 - 0.005
        assert high > 2 / 3 + 0.005
        low, high = statistics.difference_interval([0.5] * number, [0.5] * number)
        assert low < -0.01
        assert high > 0.01


def test_shares_have_the_interval_that_is_printed_in_tables() -> None:
    # Clopper and Pearson for 8 of 10: (0.444, 0.975).
    assert statistics.interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4439, 0.9748), abs=1e-4)


def test_intervals_narrow_with_more_scores_and_with_scores_that_vary_less() -> None:
    def width(scores: list[float]) -> float:
        low, high = statistics.interval(scores)
        return high - low

    assert width([0.25, 0.75] * 100) < width([0.25, 0.75] * 10) < width([0.25, 0.75] * 3)
    assert width([0.25, 0.75] * 100) < width([0.0, 1.0] * 100)
    # Without knowing that scores are shares it costs little: exact is a width of 0.142.
    low, high = statistics.bounded_interval([0.0, 1.0] * 100, 0, 1)
    assert high - low < 0.2
    narrow = statistics.bounded_interval([0.0, 1.0] * 50, 0, 1, confidence=0.8)
    wide = statistics.bounded_interval([0.0, 1.0] * 50, 0, 1, confidence=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_an_interval_of_differences_covers_rare_losses() -> None:
    draw = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        lost = draw.random(100) < 0.01
        low, high = statistics.difference_interval(1.0 - lost, [1.0] * 100)
        held += low <= -0.01 <= high
    assert held / 400 >= 0.94


def test_a_loss_has_a_sign() -> None:
    worse, better = [0.0] * 20 + [1.0] * 20, [1.0] * 40
    low, high = statistics.difference_interval(worse, better)
    assert low < -0.5 < high < 0
    assert statistics.difference_interval(better, worse) == pytest.approx((-high, -low))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "no scores"),
        ([1.2], "a score of 1.2 is not between 0 and 1"),
        ([-0.5, 0.0], "a score of -0.5"),
        ([float("nan")], "a score of nan"),
    ],
)
def test_what_is_no_score_is_refused(scores: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statistics.interval(scores)


def test_scores_of_other_examples_are_no_pairs() -> None:
    for compare in (statistics.paired_p, statistics.difference_interval, statistics.differing):
        with pytest.raises(ValueError, match="3 scores cannot be paired with 2"):
            compare([1.0, 0.0, 1.0], [1.0, 0.0])


def test_a_paired_difference_counts_by_its_pairs() -> None:
    better = [1.0] * 20 + [0.0] * 5
    assert statistics.paired_p(better, [0.0] * 25) == pytest.approx(2**-19)
    assert statistics.paired_p(better, better[::-1]) > 0.5
    assert statistics.paired_p(better, better) == 1
    assert statistics.differing(better, better[::-1]) == 10
    # The same scores in other pairs: what counts is on which examples they differ.
    first, second = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert statistics.paired_p(first, second) == 2 / 2**3
    assert statistics.paired_p(first, second[::-1]) == 2 * (1 + 5) / 2**5


def test_pairs_of_right_and_wrong_are_tested_as_mcnemar_did() -> None:
    # 9 pairs for one, 2 for the other: two-sided binomial test of 2 of 11.
    first, second = [1.0] * 9 + [0.0] * 2 + [1.0] * 30, [0.0] * 9 + [1.0] * 2 + [1.0] * 30
    exact = 2 * sum(comb(11, k) for k in range(3)) / 2**11
    assert statistics.paired_p(first, second) == pytest.approx(exact)
    assert statistics.paired_p(second, first) == pytest.approx(exact)


def test_shares_of_an_answer_are_tested_over_all_signs() -> None:
    difference = [1 / 3, 1 / 3, -1 / 4, 2 / 3, 1 / 8, 0.0]
    sums = [
        abs(sum(s * d for s, d in zip(signs, difference, strict=True)))
        for signs in product((1, -1), repeat=len(difference))
    ]
    expected = sum(total >= abs(sum(difference)) - 1e-9 for total in sums) / len(sums)
    first = [max(d, 0.0) for d in difference]
    second = [max(-d, 0.0) for d in difference]
    assert statistics.paired_p(first, second) == pytest.approx(expected)


def test_thirds_of_six_digits_are_tested_as_thirds() -> None:
    """Rounded they differ by 0.333333 or 0.333334: sums that are equal must stay equal."""
    full, lost = [1 / 3, 2 / 3, 1.0, 1 / 3, 2 / 3, 1.0], [0.0, 1 / 3, 2 / 3, 2 / 3, 1.0, 1 / 3]
    exact = 2 * (16 + 1) / 2**6  # five of 1 and one of 2 come to 3 or more: 16 of 32, or 1 of 32
    assert statistics.paired_p(lost, full) == exact
    kept = [[records.rounded(score) for score in scores] for scores in (lost, full)]
    assert statistics.paired_p(*kept) == exact


def test_differences_as_small_as_rounding_are_not_dropped() -> None:
    assert statistics.paired_p([1e-6] * 40, [0.0] * 40) == pytest.approx(2e-5)


def test_a_p_is_as_small_as_the_pairs_allow() -> None:
    assert statistics.paired_p([1.0] * 100, [0.0] * 100) == pytest.approx(2.0**-99)
    irregular = np.random.default_rng(0).random(50) + 1
    assert statistics.paired_p(irregular.tolist(), [0.0] * 50) == pytest.approx(2e-5)


def test_holm_by_hand() -> None:
    # Ascending 0.005, 0.01, 0.03, 0.04: times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; never falling.
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.7]) == [1, 1]
    assert statistics.holm([0.04]) == [0.04]
    assert statistics.holm([]) == []


def test_equivalence_needs_both_sides_within_the_margin() -> None:
    assert statistics.equivalent((-0.019, 0.019))
    assert not statistics.equivalent((-0.021, 0.0))
    assert not statistics.equivalent((0.0, 0.021))
    assert not statistics.equivalent((-0.02, 0.0))
    assert statistics.equivalent((-0.03, 0.03), margin=0.05)
    assert statistics.MARGIN == 0.02, "fixed before the figures were seen"


def test_few_examples_show_no_equivalence_and_many_do() -> None:
    def shown(number: int) -> bool:
        same = [1.0] * number
        return statistics.equivalent(statistics.difference_interval(same, same))

    assert not shown(100)
    assert shown(200)


def test_a_bootstrap_of_equal_values_tells_nothing() -> None:
    assert statistics.bootstrap_interval([0.0] * 30) == (None, None)
    values = np.random.default_rng(1).exponential(size=200)
    low, high = statistics.bootstrap_interval(values.tolist())
    assert low is not None
    assert high is not None
    assert 0.75 < low < values.mean() < high < 1.35


@pytest.mark.parametrize("number", [1, 5])
def test_one_differing_pair_says_nothing_whatever_its_size(number: int) -> None:
    first = [0.123456] + [0.5] * (number - 1)
    assert statistics.paired_p(first, [0.5] * number) == 1
