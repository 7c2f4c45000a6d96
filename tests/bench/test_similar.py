# SPDX-License-Identifier: Apache-2.0
"""The suite measures what it says: labels, shares and costs of small runs."""

import random

import numpy as np
import pytest

from bench.suites import similar

pytestmark = pytest.mark.slow  # a suite by itself


def test_passages_are_found_among_others_unless_nothing_is_left_of_them() -> None:
    *by_edits, total = similar.measure_retrieval(28)
    assert [row["edited_words"] for row in by_edits] == [*range(7)]
    assert total["passages"] == sum(row["passages"] for row in by_edits) == 28
    assert by_edits[0]["recall"] == 1
    assert total["precision"] > 0.8
    assert 0.5 < total["recall"] <= 1


def test_values_change_and_words_do_not() -> None:
    text, dice = similar.Texts(), random.Random(1)
    passage = text.passage(3)
    first, second = (text.changed(passage, 0, dice) for _ in range(2))
    assert first != second
    canonical = [text.vocabulary.canonical(text.tokens(it))[0].tolist() for it in (first, second)]
    assert canonical[0] == canonical[1]
    edited = text.vocabulary.canonical(text.tokens(text.changed(passage, 5, dice)))[0].tolist()
    assert edited != canonical[0]


@pytest.mark.parametrize("time_first", [False, True])
def test_shares_of_a_trace_are_all_of_it(time_first: bool) -> None:
    row = similar.measure_trace(2, time_first, block_size=32)
    shares = [row[name] for name in ("prefix", "content", "similar", "new")]
    assert sum(shares) == pytest.approx(1)
    assert min(shares[1:]) > 0
    assert (row["prefix"] > 0.3) is not time_first


def test_a_prefix_hit_ends_at_the_first_block_that_differs() -> None:
    tokens = np.arange(40, dtype=np.int32)
    known = {tokens[:16].tobytes(): [5], tokens[:32].tobytes(): [5, 6]}
    assert similar.prefix_hit(known, tokens, 16) == [5, 6]
    assert similar.prefix_hit(known, tokens[:32], 16) == [5]  # vLLM computes the last token
    assert similar.prefix_hit(known, tokens[1:], 16) == []


def test_both_ways_to_align_find_the_same() -> None:
    ours, theirs = similar.measure_alignment(5)
    assert ours["share_of_tokens"] == pytest.approx(theirs["share_of_tokens"], abs=0.03)
    assert ours["share_of_tokens"] > 0.6
