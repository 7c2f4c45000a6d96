# SPDX-License-Identifier: Apache-2.0
"""Runs are equal, long enough, in order, and hold as many tokens as any such choice."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.similar.align import MAX_RUNS, equal_runs

TEXT = st.lists(st.integers(0, 3), max_size=24)


def runs(prompt: list[int], donor: list[int], min_run: int) -> list[list[int]]:
    return equal_runs(np.array(prompt, np.int32), np.array(donor, np.int32), min_run).tolist()


def most_tokens(prompt: list[int], donor: list[int], min_run: int) -> int:
    """By trying everything: the longest common subsequence that is made of long enough runs."""

    @cache
    def best(i: int, j: int) -> int:
        if i >= len(prompt) or j >= len(donor):
            return 0
        found = max(best(i + 1, j), best(i, j + 1))
        length = 0
        while (
            i + length < len(prompt)
            and j + length < len(donor)
            and prompt[i + length] == donor[j + length]
        ):
            length += 1
            if length >= min_run:
                found = max(found, length + best(i + length, j + length))
        return found

    return best(0, 0)


def test_what_differs_is_left_out() -> None:
    donor = [*range(10, 20), 1, *range(20, 30)]
    assert runs([*range(10, 20), 2, 3, 4, *range(20, 30)], donor, 8) == [[0, 0, 10], [13, 11, 10]]
    assert runs([5, *range(12, 19), 6], donor, 8) == []
    assert runs([5, *range(12, 20), 6], donor, 8) == [[1, 2, 8]]
    assert runs([], donor, 8) == runs(donor, [], 8) == runs([1], donor, 8) == []


def test_the_order_of_the_donor_is_kept() -> None:
    first, second, third = [*range(10, 20)], [*range(30, 39)], [*range(50, 60)]
    # One of two: the longer. Were both taken, one would have none of its left context.
    assert runs([*second, 1, *first], [*first, 2, *second], 8) == [[10, 0, 10]]
    found = runs([*first, *second, *third], [*second, 7, *first, 8, *third], 8)
    assert found == [[0, 10, 10], [19, 21, 10]]


@given(TEXT, TEXT, st.integers(1, 5))
def test_runs_are_equal_ordered_and_long_enough(
    prompt: list[int], donor: list[int], min_run: int
) -> None:
    ends = 0, 0
    for i, j, length in runs(prompt, donor, min_run):
        assert length >= min_run
        assert prompt[i : i + length] == donor[j : j + length]
        # Runs may overlap, by less than either; the first one counts there.
        assert i + length > ends[0]
        assert j + length > ends[1]
        ends = i + length, j + length


@given(TEXT, TEXT, st.integers(2, 5))
def test_no_choice_of_runs_holds_more_tokens(
    prompt: list[int], donor: list[int], min_run: int
) -> None:
    covered = np.zeros(len(prompt), np.bool_)
    for i, _, length in runs(prompt, donor, min_run):
        covered[i : i + length] = True
    assert covered.sum() >= most_tokens(prompt, donor, min_run)


def test_text_that_repeats_itself_takes_bounded_work() -> None:
    found = runs([7] * 600, [7] * 500 + [8] + [7] * 500, 8)
    assert 0 < len(found) <= MAX_RUNS
    assert all(length >= 8 for *_, length in found)


@pytest.mark.parametrize("min_run", [1, 8, 30])
def test_equal_texts_are_one_run(min_run: int) -> None:
    text = [*range(40)]
    assert runs(text, text, min_run) == [[0, 0, 40]]
