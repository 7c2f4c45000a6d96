# SPDX-License-Identifier: Apache-2.0
"""Ids of images: no two tokens that are not the same have one at the same time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.images import ids as module
from segreuse_extras.images.finder import ImageFinder
from segreuse_extras.images.ids import ImageIds, ImageKey
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import Image, Pieces

FIRST = -(1 << 31)


def nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


def first(ids: ImageIds, key: ImageKey) -> int | None:
    """Of a prompt with one image."""
    found = ids.firsts([key])
    return None if found is None else found[0]


def test_the_same_image_has_the_same_ids_and_another_has_others():
    ids = ImageIds(nothing)
    assert first(ids, ImageKey("a", 2, 3)) == FIRST
    assert first(ids, ImageKey("b", 2, 3)) == FIRST + 6
    assert first(ids, ImageKey("a", 3, 2)) == FIRST + 12, "another grid is another image"
    assert first(ids, ImageKey("a", 2, 3)) == FIRST


def test_tokens_are_keyed_wherever_a_range_begins():
    images = PromptImages([Image(1, 1, 2), Image(4, 2, 2)], [FIRST, FIRST + 10])
    tokens = np.array([5, 9, 9, 6, 9, 9, 9, 9, 7], np.int32)
    keyed = [5, FIRST, FIRST + 1, 6, *range(FIRST + 10, FIRST + 14), 7]
    assert images.keyed(tokens).tolist() == keyed
    assert tokens[1] == 9
    for first in range(9):
        for stop in range(first, 10):
            assert images.keyed(tokens[first:stop], first).tolist() == keyed[first:stop]
    prompt = Prompt(0, images.keyed(tokens), images=images)
    assert prompt.with_tokens(np.append(tokens, np.int32(8))).tokens.tolist() == [*keyed, 8]


def test_few_images_are_remembered():
    ids = ImageIds(nothing, most=2)
    given_first = [first(ids, ImageKey(name, 1, 1)) for name in "ab"]
    assert first(ids, ImageKey("a", 1, 1)) == given_first[0]
    first(ids, ImageKey("c", 1, 1))
    assert first(ids, ImageKey("a", 1, 1)) == given_first[0]
    assert first(ids, ImageKey("b", 1, 1)) == FIRST + 3, "it was forgotten, and is another one now"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.booleans()), max_size=60))
def test_ids_are_given_again_only_once_nobody_has_them(asked):
    used: dict[int, tuple[ImageKey, int]] = {}
    ids = ImageIds(lambda: np.array(sorted(used), np.int32), ids=24, most=5)
    for name, width, keeps in asked:
        key = ImageKey(str(name), 1, width)
        given_first = first(ids, key)
        if given_first is None:
            used.clear()
            continue
        assert FIRST <= given_first <= FIRST + 24 - width
        mine = {given_first + i: (key, i) for i in range(width)}
        assert all(used.get(one, of) == of for one, of in mine.items())
        if keeps:
            used |= mine


def test_what_was_recycled_is_not_known_any_more():
    used = [FIRST]
    ids = ImageIds(lambda: np.array(used, np.int32), ids=4)
    assert [first(ids, ImageKey(name, 1, 1)) for name in "abcd"] == [*range(FIRST, FIRST + 4)]
    assert first(ids, ImageKey("e", 1, 1)) == FIRST + 1
    assert first(ids, ImageKey("a", 1, 1)) == FIRST
    assert first(ids, ImageKey("b", 1, 1)) == FIRST + 2
    used[:] = range(FIRST, FIRST + 4)
    first(ids, ImageKey("c", 1, 1))
    assert first(ids, ImageKey("f", 1, 1)) is None
    assert module.MOST_IMAGES * 300 < 1 << 25


def test_images_of_one_prompt_get_their_ids_together():
    """What one of them has got is nobody's yet while the next one's is looked for."""
    ids = ImageIds(nothing, ids=8)
    keys = [ImageKey(name, 1, 4) for name in "abca"]
    assert ids.firsts(keys) is None
    assert first(ids, keys[2]) == FIRST
    assert ids.firsts([keys[0], keys[1], keys[0]]) == [FIRST, FIRST + 4, FIRST]


class Found:
    """A finder that has found these pieces."""

    def __init__(self, rows, is_exact=False):
        self.matches = Matches(Pieces.from_table(rows), sum(row[1] for row in rows), 1, 2)
        self.is_exact = is_exact

    def prepare(self, prompt):
        self.prepared = prompt

    def remembered(self, prompt, start, stop):
        return self.matches

    def find(self, prompt, start, stop):
        return self.matches

    def plan_stop(self, matches, start, stop):
        return matches.pieces.stop if self.is_exact else stop

    part = Finder.part


def test_what_is_behind_a_new_image_is_not_reused():
    images = PromptImages([Image(4, 1, 4), Image(10, 1, 2)], [FIRST, FIRST + 4])
    prompt = Prompt(0, np.zeros(20, np.int32), images=images)
    whole = [[0, 4, 1, 0, 0], [4, 4, 2, 0, 4], [8, 1, 3, 0, 8]]
    inner = Found([*whole, [11, 8, 4, 0, 3]])
    finder = ImageFinder(inner, images)
    finder.prepare(prompt)
    assert inner.prepared is prompt
    for found in (finder.find(prompt, 0, 19), finder.remembered(prompt, 0, 19)):
        assert found.pieces.rows() == whole
        assert (found.num_tokens, found.num_segments, found.max_depth) == (9, 1, 2)
        assert finder.plan_stop(found, 0, 19) == 9
    none = ImageFinder(Found([[0, 4, 1, 0, 0], [5, 14, 2, 0, 0]]), images)
    assert none.find(prompt, 0, 19).pieces.rows() == [[0, 3, 1, 0, 0]]
    for rows, stop in (([[0, 4, 1, 0, 0], [4, 3, 2, 0, 4]], 3), (whole, 9), ([], 0)):
        exact = ImageFinder(Found(rows, is_exact=True), images)
        assert exact.is_exact
        assert exact.plan_stop(exact.find(prompt, 0, 19), 0, 19) == stop


def test_without_a_part_of_an_image_nothing_is_reused_from_there_on():
    images = PromptImages([Image(4, 1, 4), Image(10, 1, 2)], [FIRST, FIRST + 4])
    prompt = Prompt(0, np.zeros(20, np.int32), images=images)
    rows = [[0, 4, 1, 0, 0], [4, 4, 2, 0, 4], [8, 4, 3, 0, 8], [12, 4, 4, 0, 12]]
    finder = ImageFinder(Found(rows), images)
    found = finder.find(prompt, 0, 19)
    for kept, left in (
        ([1, 1, 1, 0], rows[:3]),
        ([1, 1, 0, 1], rows[:2]),
        ([1, 0, 1, 1], [[0, 3, 1, 0, 0]]),
    ):
        part = finder.part(prompt, found, np.array(kept, np.bool_), 0, 19)
        assert part.pieces.rows() == left
