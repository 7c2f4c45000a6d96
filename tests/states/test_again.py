# SPDX-License-Identifier: Apache-2.0
"""How much of what is reused is read again, and which segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from segreuse_extras.states.again import ReadAgain, chosen, recipe
from vllm_segreuse.plan import Counts, Fixed, ModelLayers, Recipe, Segments
from vllm_segreuse.policies import Situation

HEAD, QUESTION = 20, 30


def made(
    lengths: list[int],
    ratio: float | None = None,
    in_context: int = 0,
    gap: int = 0,
    question: int = QUESTION,
) -> tuple[Recipe | None, list[tuple[int, int]]]:
    """The recipe of segments of these lengths, and where they are.

    Args:
        in_context: so many of the first ones are where they were read.
        gap: new tokens between two of them.
    """
    firsts = np.cumsum([HEAD, *(length + gap for length in lengths)])
    spans = [(int(first), int(first) + n) for first, n in zip(firsts[:-1], lengths, strict=True)]
    stop = spans[-1][1]
    reused = np.zeros(stop + question, np.bool_)
    for first, end in spans:
        reused[first:end] = True
    where = np.array([first for first, _ in spans], np.int32)
    segments = Segments(
        where,
        where + 500,
        np.arange(len(spans)) < in_context,
        np.ones(len(spans)),
    )
    situation = Situation(reused, segments, 16, 8, ratio, 0, None)
    return recipe(situation, spans), spans


def reads(lengths: list[int], **more: float) -> tuple[int, int]:
    """Budget of all, and of the first."""
    found, _ = made(lengths, **more)  # type: ignore[arg-type]
    assert found is not None
    assert isinstance(found.program, ReadAgain)
    return found.program.budget, found.top_k


@pytest.mark.parametrize(
    ("lengths", "budget", "most"),
    [
        ([72] * 8, 144, 144),
        ([100] * 5, 125, 125),
        ([100] * 3, 75, 100),
        ([100] * 2, 50, 100),
        ([400, 200, 200], 200, 400),
        ([700, 100, 100], 225, 225),
    ],
)
def test_a_quarter_is_read_again_or_one_segment_up_to_a_half(
    lengths: list[int], budget: int, most: int
) -> None:
    assert reads(lengths) == (budget, most)


def test_a_share_that_is_given_is_the_most() -> None:
    assert reads([100] * 5, ratio=0.5) == (250, 250)
    assert reads([100] * 2, ratio=0.99) == (198, 198)
    found, _ = made([100] * 5, ratio=0.1)
    assert found is not None
    assert found.program == Fixed(), "no segment fits"
    found, _ = made([100] * 2, ratio=0.0)
    assert found is not None
    assert found.settled.sum() == HEAD + QUESTION


@pytest.mark.parametrize("lengths", [[300], [300, 20], [100] * 4])
def test_where_no_choice_is_left_none_is_asked(lengths: list[int]) -> None:
    found, _ = made(lengths, ratio=1)
    assert found is not None
    assert found.program == Fixed()
    assert found.settled.all()


def test_a_segment_that_is_most_of_the_prompt_is_moved() -> None:
    found, _ = made([300])
    assert found is not None
    assert found.program == Fixed()
    assert found.settled.sum() == HEAD + QUESTION


def test_the_question_is_all_that_is_new_behind_the_last_segment() -> None:
    found, spans = made([100] * 4, gap=3)
    assert found is not None
    stop = spans[-1][1]
    assert found.probes[stop:].all()
    assert not found.probes[:stop].any()
    assert found.always.sum() == HEAD + 3 * 3 + QUESTION
    assert found.suffix_tokens(stop) == QUESTION
    without, _ = made([100] * 4, question=0)
    assert without is not None
    assert not without.probes.any()
    assert without.program.probes_suffix, "it is asked by the prompt's last token"


def test_what_is_in_its_own_context_is_not_read_again() -> None:
    found, spans = made([100] * 6, in_context=2)
    assert found is not None
    assert not found.candidates[: spans[1][1]].any()
    assert found.candidates.sum() == 400
    assert (found.program, found.top_k) == (ReadAgain(100), 100)
    found, spans = made([100] * 3, in_context=2)
    assert found is not None
    assert found.program == Fixed(), "the only one is read without a question"
    assert found.settled[slice(*spans[2])].all()
    assert not found.settled[slice(*spans[1])].any()
    found, _ = made([100] * 3, in_context=3)
    assert found is not None
    assert found.settled.sum() == HEAD + QUESTION


def test_a_segment_that_is_partly_in_its_own_context_is_read_as_a_whole() -> None:
    reused = np.ones(400, np.bool_)
    reused[:HEAD] = False
    where = np.array([HEAD, 60, 100], np.int32)
    in_context = np.array([True, False, False])
    segments = Segments(where, where + 500, in_context, np.ones(3))
    found = recipe(Situation(reused, segments, 16, 8, None, 0, None), [(HEAD, 100), (100, 400)])
    assert found is not None
    assert found.candidates.sum() == 380
    assert found.top_k == 95


def test_what_costs_as_much_as_full_prefill_is_not_reused() -> None:
    """New text behind what is chosen, and the question, are computed twice."""
    lengths = [100] * 4
    assert made(lengths, gap=70)[0] is not None
    assert made(lengths, gap=98)[0] is None
    assert made(lengths, question=299)[0] is not None
    assert made(lengths, question=300)[0] is None
    assert made(lengths, question=300, ratio=0.25)[0] is not None, "a share is taken as it is"


def test_what_it_costs() -> None:
    layers = ModelLayers.of_full_attention(8)
    counts = Counts(tokens=500, always=50, chosen=100, probes=0, suffix=30)
    assert ReadAgain(100).cost(counts, layers) == 8 * 180
    assert ReadAgain(100).most_active(counts) == 230
    assert ReadAgain(100).reports


@pytest.mark.parametrize(
    ("paid", "lengths", "budget", "most", "expected"),
    [
        ([1, 9, 3, 4], [10] * 4, 20, 20, [1, 3]),
        ([1, 9, 3, 4], [10] * 4, 19, 19, [1]),
        ([1, 9, 3, 4], [10, 30, 10, 10], 20, 20, [2, 3]),
        ([1, 9, 3, 4], [10, 30, 10, 10], 20, 30, [1]),
        ([1, 9, 3, 4], [10, 5, 30, 10], 20, 30, [1, 3]),
        ([5, 5, 5], [10] * 3, 20, 20, [0, 1]),
        ([5, 6], [10, 10], 9, 9, []),
        ([5, 6], [10, 50], 9, 10, [0]),
        ([], [], 9, 9, []),
    ],
)
def test_the_best_that_fit_are_chosen(
    paid: list[float], lengths: list[int], budget: int, most: int, expected: list[int]
) -> None:
    assert chosen(paid, lengths, budget, most) == expected


def test_more_is_never_read_than_allowed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = int(rng.integers(1, 9))
        lengths = rng.integers(1, 50, count).tolist()
        budget = int(rng.integers(0, 80))
        most = budget + int(rng.integers(0, 40))
        found = chosen(rng.random(count).tolist(), lengths, budget, most)
        assert all(first < second for first, second in pairwise(found))
        in_all = sum(lengths[number] for number in found)
        assert in_all <= budget or (len(found) == 1 and in_all <= most)
        assert found or min(lengths) > most
