# SPDX-License-Identifier: Apache-2.0
"""Documents are found as they were computed alone, token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.trained.finder import IsolatedDocument, IsolatedFinder
from vllm_segreuse.cache.prompt import Prompt

PROMPT = Prompt(0, np.zeros(99, np.int32))


def document(start: int, stop: int, blocks: list[int] | None) -> IsolatedDocument:
    found = None if blocks is None else np.array(blocks, np.int32)
    return IsolatedDocument(start, stop, (), lambda: found)


def test_a_document_is_moved_from_position_zero() -> None:
    finder = IsolatedFinder([document(5, 15, [70, 71, 72])], 4)
    matches = finder.find(PROMPT, 0, 40)
    assert matches.pieces.rows() == [[5, 4, 70, 0, 0], [9, 4, 71, 0, 4], [13, 2, 72, 0, 8]]
    assert (matches.num_tokens, matches.num_segments, matches.max_depth) == (10, 1, 0)
    assert finder.plan_stop(matches, 0, 40) == 40


def test_what_is_in_the_prefix_hit_is_not_moved() -> None:
    finder = IsolatedFinder([document(0, 10, [70, 71, 72]), document(12, 15, [80])], 4)
    assert finder.find(PROMPT, 6, 40).pieces.rows() == [
        *([6, 2, 71, 2, 6], [8, 2, 72, 0, 8]),
        [12, 3, 80, 0, 0],
    ]
    assert finder.find(PROMPT, 10, 40).pieces.rows() == [[12, 3, 80, 0, 0]]
    assert finder.find(PROMPT, 15, 40).num_tokens == 0


def test_a_document_that_is_not_there_is_missing() -> None:
    cold, warm = document(4, 6, None), document(8, 9, [3])
    finder = IsolatedFinder([cold, warm], 4)
    assert finder.missing(0) == finder.missing(5) == [cold]
    assert finder.missing(6) == []
    assert finder.find(PROMPT, 0, 40).pieces.rows() == [[8, 1, 3, 0, 0]]


@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 90), st.integers(1, 8))
def test_every_token_comes_from_its_own_place(length, begin, start, size) -> None:
    blocks = list(range(100, 100 - (-length // size)))
    matches = IsolatedFinder([document(begin, begin + length, blocks)], size).find(
        PROMPT, start, 99
    )
    copied = {}
    for destination, count, block, offset, position in matches.pieces.rows():
        for i in range(count):
            copied[destination + i] = ((block - 100) * size + offset + i, position + i)
    wanted = range(max(begin, start), max(begin + length, start))
    assert copied == {at: (at - begin, at - begin) for at in wanted if at < begin + length}
