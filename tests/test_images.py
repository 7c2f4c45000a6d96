# SPDX-License-Identifier: Apache-2.0
"""Numbers of tokens in and around images, against the definition; moves between two prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.plan import (
    Boundary,
    Deviation,
    Fixed,
    Gather,
    Image,
    Images,
    Pieces,
    Probed,
    Recipe,
    ReusePlan,
    fates_of,
)

SIZE = 4
GRID = st.tuples(st.integers(1, 5), st.integers(1, 5))
PARTS = st.lists(st.tuples(st.integers(0, 6), GRID), max_size=4)


def layout(parts: list[tuple[int, tuple[int, int]]]) -> tuple[Images, int]:
    """Images behind so much text each, and the tokens up to the end of the last."""
    images, at = [], 0
    for text, grid in parts:
        images.append(Image(at + text, *grid))
        at = images[-1].stop
    return Images(images), at


def defined(images: Images, count: int) -> list[tuple[int, int, int]]:
    """Token by token, as M-RoPE numbers them."""
    numbers: list[tuple[int, int, int]] = []
    for image in images.images:
        while len(numbers) < image.start:
            numbers.append((max(map(max, numbers), default=-1) + 1,) * 3)
        base = max(map(max, numbers), default=-1) + 1
        numbers += [
            (base, base + row, base + column)
            for row in range(image.height)
            for column in range(image.width)
        ]
    while len(numbers) < count:
        numbers.append((max(map(max, numbers), default=-1) + 1,) * 3)
    return numbers


@given(PARTS, st.integers(0, 9), st.integers(0, 40), st.integers(0, 40))
def test_numbers_are_those_of_mrope(parts, behind, low, high):
    images, end = layout(parts)
    count = end + behind
    expected = np.array(defined(images, count), np.int32).reshape(-1, 3).T
    start, stop = sorted((min(low, count), min(high, count)))
    assert images.mrope_positions(0, count).tolist() == expected.tolist()
    assert images.mrope_positions(start, stop).tolist() == expected[:, start:stop].tolist()
    assert images.covers(start, stop).tolist() == images.covers(0, count)[start:stop].tolist()
    assert images.covers(0, count).sum() == sum(it.height * it.width for it in images.images)


@given(PARTS, PARTS, st.integers(0, 12), st.integers(1, 3))
def test_one_turn_moves_all_three_rows(here, there, behind, which):
    """A token of an image, and text, changes by as much in each row, whatever stands in front."""
    shared = [(3, (2, 4)), (1, (3, 1))][: which - 1]
    one, end_one = layout([*here, *shared])
    other, end_other = layout([*there, *shared])
    length = end_one - layout(here)[1] + behind
    first_one, first_other = layout(here)[1], layout(there)[1]
    a = one.mrope_positions(first_one, first_one + length)
    b = other.mrope_positions(first_other, first_other + length)
    turn = (
        np.arange(length) + first_other - other.position_offsets(first_other, first_other + length)
    ) - (np.arange(length) + first_one - one.position_offsets(first_one, first_one + length))
    assert (b - a == turn).all()
    assert end_one + behind == first_one + length
    assert end_other + behind == first_other + length


def test_pieces_are_split_where_an_image_ends():
    donor, images = Images([Image(2, 2, 3)]), Images([Image(5, 2, 3)])
    behind = np.zeros((8, SIZE), np.int32)
    behind[3:6] = donor.position_offsets(0, 12).reshape(3, SIZE)
    # All twelve tokens of the donor, three positions on.
    pieces = Pieces.from_table([[3, 4, 3, 0, 0], [7, 4, 4, 0, 4], [11, 4, 5, 0, 8]])
    turned = pieces.turned(behind, images)
    assert turned.turn.tolist() == [3, 3, 3]
    assert turned.rows() == pieces.rows()
    # The same text, in a prompt without images in front: from the image's end on keys turn by more.
    text = Pieces.from_table([[0, 3, 5, 1, 9]]).turned(behind, None)
    assert (text.turn.tolist(), text.rows()) == ([-6], [[0, 3, 5, 1, 9]])
    mixed = Pieces.from_table([[20, 4, 4, 0, 4]]).turned(behind, None)
    assert mixed.turn.tolist() == [16]  # tokens 4 to 7 of the donor are the image's
    ends = Pieces.from_table([[20, 4, 3, 0, 0], [24, 4, 5, 0, 8]]).turned(behind, images)
    assert ends.turn.tolist() == [17, 16]


def test_a_piece_within_which_an_image_ends_is_cut_there():
    behind = np.array([[0, 0, 3, 3]], np.int32)
    found = Pieces.from_table([[10, 4, 0, 0, 40]]).turned(behind, None)
    assert found.rows() == [[10, 2, 0, 0, 40], [12, 2, 0, 2, 42]]
    assert found.turn.tolist() == [-30, -27]
    assert len(found.segments(10).first) == 1, "it is one segment still"


@pytest.mark.parametrize(
    ("reused", "start", "stop", "limit"),
    [
        ([*range(20)], 0, 20, 20),
        ([*range(11), *range(12, 20)], 0, 20, 4),  # a token of the first image is missing
        ([*range(15), *range(16, 20)], 0, 20, 13),  # one of the second
        ([*range(13), 13, *range(14, 19)], 0, 19, 19),
        ([*range(8, 20)], 8, 20, 20),  # the prefix ends within the first image
        ([*range(9, 20)], 8, 20, 8),
        ([*range(14)], 0, 14, 13),  # the prompt ends before the second image does
        ([], 0, 20, 4),
    ],
)
def test_a_plan_ends_in_front_of_the_first_image_that_is_not_whole(reused, start, stop, limit):
    images = Images([Image(5, 2, 4), Image(14, 1, 2)])
    mask = np.zeros(stop, np.bool_)
    mask[reused] = True
    assert images.limit(mask[start:], start, stop) == limit


def test_a_plan_does_not_end_within_an_image_in_front_of_a_new_one():
    images = Images([Image(3, 1, 2), Image(5, 1, 2), Image(7, 2, 2)])
    mask = np.ones(20, np.bool_)
    mask[9] = False
    assert images.limit(mask, 0, 20) == 2


HELD = np.array([False, True, True, False, False, False, False, False])


def test_tokens_of_images_are_neither_computed_nor_chosen():
    new = np.array([True, *[False] * 6, True])
    recipe = Recipe.of(Boundary(), fates_of(new | HELD, new | HELD), top_k=3).fixing(HELD)
    assert recipe.always.tolist() == new.tolist()
    assert recipe.probes.tolist() == new.tolist()
    assert recipe.fixed.tolist() == HELD.tolist()
    assert recipe.top_k == 3
    assert recipe.also(HELD).always.tolist() == new.tolist()


@pytest.mark.parametrize(("top_k", "left", "settled"), [(6, 4, True), (3, 2, False)])
def test_of_the_other_tokens_the_same_share_is_chosen(top_k, left, settled):
    new = np.array([True, *[False] * 6, True])
    recipe = Recipe.of(Boundary(), fates_of(new, new), top_k=top_k).fixing(HELD)
    assert recipe.top_k == left
    assert recipe.leaves_a_choice is not settled
    assert recipe.settled.tolist() == (~HELD if settled else new).tolist()


def test_a_program_that_computes_before_it_chooses_has_no_choice_but_images():
    new = np.array([*[False] * 7, True])
    recipe = Recipe.of(Probed(Gather.SUM), fates_of(new, new), top_k=7).fixing(HELD)
    assert isinstance(recipe.program, Fixed)
    assert recipe.always.tolist() == (~HELD).tolist()


def test_images_cannot_pass_dense_layers():
    new = np.array([True, *[False] * 7])
    with pytest.raises(ValueError, match="computes every token, and those of images cannot be"):
        Recipe.of(Deviation(1), fates_of(new, new), top_k=2).fixing(HELD)


def test_in_full_is_all_but_images():
    new = np.array([True, *[False] * 7])
    plan = ReusePlan(
        *("r", 0, 8, np.zeros(8, np.int32), Pieces.from_table([[1, 7, 2, 0, 0]])),
        Recipe.of(Boundary(), fates_of(new, new), top_k=2).fixing(HELD),
        *([2], 0),
    )
    full = plan.in_full()
    assert full.recipe.always.tolist() == (~HELD).tolist()
    assert full.moved.tolist() == HELD.tolist(), "their copies are still needed"
    assert (plan.num_fixed, full.num_fixed, full.num_recomputed) == (2, 2, 5)
