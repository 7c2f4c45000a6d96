# SPDX-License-Identifier: Apache-2.0
"""Which blocks of several KV cache groups hold the same tokens, until one of them is taken."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.integrity import check_integrity
from vllm_segreuse.cache.siblings import Siblings

BLOCKS, OTHERS = 24, 2


def test_blocks_are_whole_until_a_sibling_is_taken() -> None:
    siblings = Siblings(BLOCKS, OTHERS)
    siblings.note([1, 2], [[3, 4], [5, 6]])
    assert siblings.of(np.array([2, 1])).tolist() == [[4, 3], [6, 5]]
    assert siblings.all_of([1]) == [3, 5]
    assert siblings.are_whole([1, 2, 7]).tolist() == [True, True, False]
    assert siblings.lost([9]) == []
    assert siblings.lost([6, 5]) == [1, 2]
    assert siblings.are_whole([1, 2]).tolist() == [False, False]
    assert siblings.all_of([1]) == []
    check_integrity(siblings)


def test_a_block_that_a_window_has_passed_is_nobodys_sibling() -> None:
    siblings = Siblings(BLOCKS, OTHERS)
    siblings.note([1], [[-1], [5]])
    assert siblings.are_whole([1]).tolist() == [False]
    assert siblings.all_of([1]) == []
    check_integrity(siblings)


def test_a_block_that_is_taken_itself_frees_its_siblings() -> None:
    siblings = Siblings(BLOCKS, OTHERS)
    siblings.note([1], [[3], [5]])
    assert siblings.lost([1]) == []
    assert siblings.lost([3, 5]) == []
    check_integrity(siblings)


@given(st.data())
def test_what_is_known_is_what_was_noted_last(data: st.DataObject) -> None:
    """Beside a model that keeps a list of siblings by block."""
    siblings, known = Siblings(BLOCKS, OTHERS), dict[int, list[int]]()
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.permutations(range(1, BLOCKS)))[: 1 + OTHERS]
        taken = {*ids}
        broken = {it for it, its in known.items() if taken & {*its}}
        assert {*siblings.lost(ids)} == broken - taken
        known = {it: its for it, its in known.items() if it not in taken | broken}
        if data.draw(st.booleans()):  # the blocks are filled with the same tokens
            siblings.note(ids[:1], [[block] for block in ids[1:]])
            known[ids[0]] = ids[1:]
        found = {block for block in range(BLOCKS) if siblings.are_whole([block])[0]}
        assert found == known.keys()
        assert all(siblings.all_of([block]) == its for block, its in known.items())
        check_integrity(siblings)
