# SPDX-License-Identifier: Apache-2.0
"""What a plan says of itself, counted by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.plan import (
    BoolArray,
    IntArray,
    Recipe,
    ReusePlan,
    Score,
    reused_mask,
    segment_starts,
)

START = 8
NEW = {0, 1, 6, 9}
"""Tokens of ten, counted from the start, that are not reused."""
LAYERS = 5

BY_LAYERS = {"score": Score.ALL_LAYERS, "asked": True}
BY_PEAK = {"score": Score.PEAK, "asked": True}
BY_DEVIATION = {"score": Score.DEVIATION, "dense": 1}


def pieces(*rows: tuple[int, int, int]) -> IntArray:
    """(destination, length, donor position) of each piece, of as many blocks."""
    made = np.zeros((len(rows), 5), np.int32)
    for number, (destination, length, position) in enumerate(rows):
        made[number] = destination, length, 70 + number, 0, position
    return made


def mask(of: set[int]) -> BoolArray:
    return np.isin(np.arange(10), list(of))


def plan(
    again: set[int] = frozenset(),
    top_k: int = 0,
    dense: int = 0,
    score: Score = Score.ATTENTION,
    asked: bool = False,
) -> ReusePlan:
    """Ten tokens, six of them reused; the probes are the two at the end that are new."""
    recipe = Recipe(mask(NEW | again), dense, top_k, mask({6, 9}), score)
    found = pieces((START + 2, 4, 30), (START + 7, 2, 90))
    tokens = np.arange(10, dtype=np.int32)
    next_token = 99 if asked else None
    return ReusePlan("r", START, START + 10, tokens, found, recipe, [70, 71], 0, None, next_token)


def test_its_tokens_add_up() -> None:
    some = plan(again={2, 3}, top_k=3)
    assert (some.num_tokens, some.num_reused, some.num_recomputed) == (10, 6, 2 + 3)
    assert some.recomputed(chosen=1) == 2 + 1
    assert some.reused.tolist() == (~mask(NEW)).tolist()


def test_the_token_that_is_asked_is_written_but_not_supplied() -> None:
    assert (plan().num_written, plan(asked=True).num_written) == (10, 11)
    assert plan(asked=True).num_tokens == 10


@pytest.mark.parametrize(
    ("options", "work"),
    [
        # The four new tokens at each layer.
        ({}, 4 * LAYERS),
        ({"again": {2}}, 5 * LAYERS),
        # All ten at the dense layers, new and chosen ones at the others.
        ({"dense": 2, "top_k": 3}, 2 * 10 + 3 * (4 + 3)),
        # At the first layer once more, where scores come from there.
        ({"top_k": 3}, 5 * (4 + 3) + 4),
        ({"top_k": 3, "asked": True}, 5 * (4 + 1 + 3) + 4 + 1),
        # The two probes and the token that is asked, at all layers but the last.
        ({"top_k": 3, **BY_LAYERS}, 5 * (4 + 1 + 3) + 4 * (2 + 1)),
        ({"top_k": 3, **BY_PEAK}, 5 * (4 + 1 + 3) + 4 * (2 + 1)),
        ({"top_k": 3, **BY_DEVIATION}, 10 + 4 * (4 + 3)),
    ],
)
def test_its_work_is_that_of_its_layers(options: dict[str, Any], work: int) -> None:
    assert plan(**options).layer_tokens(LAYERS) == work


def test_the_work_depends_on_how_many_were_chosen() -> None:
    some = plan(top_k=3, **BY_PEAK)
    assert some.layer_tokens(LAYERS) - some.layer_tokens(LAYERS, chosen=1) == 2 * LAYERS
    assert some.layer_tokens(LAYERS, chosen=0) == 5 * (4 + 1) + 4 * (2 + 1)


def test_a_dense_layer_has_all_tokens_active() -> None:
    assert plan(again={2}, top_k=3).active_tokens == 5 + 3
    assert plan(again={2}, top_k=3, dense=1).active_tokens == 10


@pytest.mark.parametrize("score", Score)
def test_who_is_asked(score: Score) -> None:
    """The query of the next token helps wherever attention decides, if anything is decided."""
    assert plan(top_k=1, score=score).recipe.asks_next_token == (score is not Score.DEVIATION)
    assert not plan(top_k=0, score=score).recipe.asks_next_token
    assert score.asks_all_layers == (score in {Score.ALL_LAYERS, Score.PEAK})


def test_in_full_it_computes_everything_at_every_layer_and_asks_nobody() -> None:
    some = plan(top_k=3, dense=1, **BY_PEAK).in_full()
    assert some.recipe.always.all()
    assert (some.recipe.top_k, some.recipe.dense_layers, some.recipe.stock) == (0, 0, False)
    assert (some.num_recomputed, some.layer_tokens(LAYERS, 0)) == (6, LAYERS * (10 + 1))
    assert some.next_token == 99, "its slot has to be written in any case"


@pytest.mark.parametrize(
    ("rows", "starts"),
    [
        ([], []),
        ([(8, 4, 0)], [0]),
        ([(8, 4, 0), (12, 4, 4)], [0]),  # follow each other here and there
        ([(8, 4, 0), (12, 4, 5)], [0, 4]),  # here only
        ([(8, 4, 0), (13, 4, 5)], [0, 5]),  # there only, with a token between them
        ([(10, 2, 7), (12, 3, 9), (20, 1, 17)], [2, 12]),
    ],
)
def test_a_segment_begins_where_tokens_did_not_follow_each_other(
    rows: list[tuple[int, int, int]], starts: list[int]
) -> None:
    assert segment_starts(pieces(*rows), START).tolist() == starts


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=8), st.integers(0, 20))
def test_reused_are_the_tokens_of_the_pieces(runs: list[tuple[int, int]], start: int) -> None:
    rows, expected = [], []
    for gap, length in runs:
        expected += [False] * gap
        rows.append((start + len(expected), length, 0))
        expected += [True] * length
    stop = start + len(expected) + 3
    assert reused_mask(pieces(*rows), start, stop).tolist() == [*expected, False, False, False]
