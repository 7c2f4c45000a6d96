# SPDX-License-Identifier: Apache-2.0
"""Runs are equal, long enough, in order, and hold as many tokens as any such choice."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.similar.align import MAX_RUNS, donor_slots, equal_runs
from tests.cache.choice import equal_length
from vllm_segreuse.cache.index import SegmentIndex

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


@pytest.mark.parametrize(("prompt", "donor"), [(7, 8), (8, 7), (8, 8), (9, 8), (8, 9)])
def test_texts_of_about_the_least_run(prompt: int, donor: int) -> None:
    found = runs([*range(prompt)], [*range(donor)], 8)
    assert found == ([] if min(prompt, donor) < 8 else [[0, 0, 8]])


Run = tuple[int, int, int]


def maximal(prompt: list[int], donor: list[int], min_run: int) -> list[Run]:
    """All equal runs that cannot be longer, in the order of the prompt, then of the donor."""
    found = []
    for i in range(len(prompt)):
        for j in range(len(donor)):
            length = equal_length(prompt[i:], donor[j:])
            if length >= min_run and (not i or not j or prompt[i - 1] != donor[j - 1]):
                found.append((i, j, length))
    return found


def overlap(one: Run, other: Run) -> int:
    """Tokens of the second run that do not lie behind the first in both texts."""
    return max(0, *(one[side] + one[2] - other[side] for side in (0, 1)))


def chains(found: list[Run]) -> Iterator[list[Run]]:
    """All choices of runs, each of which adds something behind the one before it."""
    if not found:
        yield []
        return
    for rest in chains(found[1:]):
        yield rest
        if not rest or overlap(found[0], rest[0]) < rest[0][2]:
            yield [found[0], *rest]


def gain(chain: list[Run]) -> int:
    return sum(run[2] for run in chain) - sum(overlap(*pair) for pair in pairwise(chain))


def test_the_runs_are_the_best_of_all_choices_of_maximal_runs() -> None:
    rng = np.random.default_rng(7)
    tried = 0
    for _ in range(600):
        symbols, min_run = int(rng.integers(2, 6)), int(rng.integers(1, 4))
        prompt, donor = (rng.integers(0, symbols, rng.integers(0, 14)).tolist() for _ in range(2))
        whole = maximal(prompt, donor, min_run)
        if len(whole) > 10:
            continue
        chosen = [(i, j, length) for i, j, length in runs(prompt, donor, min_run)]
        assert set(chosen) <= set(whole)
        assert all(overlap(*pair) < pair[1][2] for pair in pairwise(chosen))
        assert gain(chosen) == max(map(gain, chains(whole)))
        tried += len(whole) > 2
    assert tried > 100


@pytest.mark.parametrize("number", [95, 96, 97, 120])
def test_of_many_runs_the_first_ones_are_taken(number: int) -> None:
    words = [[*range(10 * i, 10 * i + 8)] for i in range(number)]
    prompt = [token for i, word in enumerate(words) for token in (*word, 5000 + i)]
    donor = [token for i, word in enumerate(words) for token in (*word, 7000 + i)]
    expected = [[9 * i, 9 * i, 8] for i in range(min(number, 96))]
    assert runs(prompt, donor, 8) == expected


@pytest.mark.parametrize(("others", "expected"), [(31, [0, 31 * 4, 8]), (32, None)])
def test_of_many_places_with_equal_text_the_first_are_compared(
    others: int, expected: list[int] | None
) -> None:
    text = [*range(1, 9)]
    donor = [token for i in range(others) for token in (*text[:3], 100 + i)] + text
    (found,) = runs(text, donor, 3)
    assert found == expected if expected else found[2] == 3


SIZE = 4
SAME = [*range(100, 116)]


def slots(
    tokens: list[int],
    *candidates: tuple[int, int, int, int],
    min_run: int = 3,
    min_context: int = 2,
    gone: int = -1,
) -> list[int]:
    """Of a sequence in blocks 5 to 8, and of one in 0 to 3 whose fifth token is another."""
    held = SegmentIndex(10, SIZE)
    other = [*SAME[:4], 99, *SAME[5:]]
    for first, text in ((5, SAME), (0, other)):
        ids = np.arange(first, first + 4, dtype=np.int32)
        held.insert(0, ids, np.array(text, np.int32), 0)
    held.remove([gone])
    table = np.array(candidates, np.int32)
    text = np.array(tokens, np.int32)
    return donor_slots(held.nodes, held.tokens, text, table, min_run, min_context).tolist()


def test_tokens_get_the_slots_of_equal_ones_behind_equal_context() -> None:
    tokens = [1, *SAME[2:10], 2]
    assert slots(tokens, (0, 10, 7, 12)) == [-1] * 3 + [*range(24, 30)] + [-1]
    assert slots(tokens, (0, 10, 7, 12), min_context=0) == [-1, *range(22, 30), -1]
    assert slots(tokens, (0, 10, 7, 12), min_run=8) == [-1] * 3 + [*range(24, 30)] + [-1]
    assert slots(tokens, (0, 10, 7, 12), min_run=9) == [-1] * 10
    assert slots(tokens, (0, 10, 7, 7)) == [-1] * 6 + [27, 28, 29, -1], "its last seven tokens"
    assert slots(tokens, (0, 10, 7, 12), gone=5) == [-1] * 5 + [26, 27, 28, 29, -1]
    assert slots(tokens, (3, 8, 7, 12)) == [-1] * 5 + [26, 27, 28] + [-1] * 2
    assert slots(tokens, (0, 10, 3, 16), min_context=0) == [-1] * 4 + [*range(5, 10), -1]


def test_the_better_candidate_comes_first_and_others_fill_what_it_leaves() -> None:
    tokens, whole, broken = SAME[:12], (0, 12, 8, 16), (0, 12, 3, 16)
    assert slots(tokens, whole, broken, min_context=0) == [*range(20, 32)]
    mixed = [0, 1, 2, 3, 24, *range(5, 12)]
    assert slots(tokens, broken, whole, min_context=0) == mixed
    assert slots(tokens, broken, whole) == [-1, -1, 2, 3, 24, 25, 26, *range(7, 12)]
