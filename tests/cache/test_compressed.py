# SPDX-License-Identifier: Apache-2.0
"""Compressed documents: which blocks their tokens come from, and for whom."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.integrity import check_integrity
from segreuse_extras.compressed.finder import CopyFinder, NamedFinder, PartsFinder
from segreuse_extras.compressed.orders import AnchorOrder, CopyOrder, ScoreOrder
from segreuse_extras.copies import outside, rows, within
from tests.cache.test_frozen import Pool, order
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.features.knowledge.frozen import FrozenPart, FrozenPool
from vllm_segreuse.plan import NO_HALO, Halo, Pieces

SIZE = 4


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def copied(table: Any) -> dict[int, tuple[int, int, int]]:
    """(block, offset, position) of every token, by destination."""
    found = {}
    for destination, length, block, offset, position in np.asarray(table).tolist():
        for i in range(length):
            assert destination + i not in found
            found[destination + i] = (block, offset + i, position + i)
    return found


def part(*tokens: int, first_block: int = 50, namespace: int = 0) -> FrozenPart:
    blocks = range(first_block, first_block + -(-len(tokens) // SIZE))
    return FrozenPart(namespace, list(blocks), None, array(*tokens))


# Rows.


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 9), st.integers(1, 8))
def test_every_token_comes_from_its_own_slot(kept: set[int], destination: int, size: int) -> None:
    positions, blocks = array(*sorted(kept)), np.arange(100, 100 + 31 // size + 1, dtype=np.int32)
    table = rows(blocks, positions, destination, size)
    assert copied(table) == {
        destination + i: (100 + at // size, at % size, at) for i, at in enumerate(sorted(kept))
    }
    for _, length, _, offset, _ in table.tolist():
        assert offset + length <= size, "a piece lies in one block"


def test_tokens_that_follow_each_other_are_one_piece() -> None:
    table = rows(array(7, 8, 9), array(1, 2, 3, 4, 6, 9), 20, SIZE)
    assert table.tolist() == [
        [20, 3, 7, 1, 1],
        [23, 1, 8, 0, 4],
        [24, 1, 8, 2, 6],
        [25, 1, 9, 1, 9],
    ]


@given(st.integers(0, 20), st.integers(0, 20))
def test_pieces_are_cut_to_what_is_planned(start: int, more: int) -> None:
    table = rows(np.arange(9, dtype=np.int32), np.arange(0, 18, dtype=np.int32), 2, SIZE)
    wanted = {at: slot for at, slot in copied(table).items() if start <= at < start + more}
    assert copied(within(table, start, start + more)) == wanted


def test_what_goes_to_a_document_is_left_out() -> None:
    pieces = Pieces.from_table([[0, 4, 1, 0, 0], [4, 4, 2, 0, 4], [8, 4, 3, 0, 8]])
    assert outside(pieces, [(4, 8)]).rows() == [[0, 4, 1, 0, 0], [8, 4, 3, 0, 8]]
    assert outside(pieces, [(7, 9)]).rows() == [[0, 4, 1, 0, 0]]
    assert len(outside(pieces, [(0, 1), (11, 12)])) == 1


# Copies.


def copy_of(blocks: list[int], *positions: int) -> Matches:
    finder = CopyFinder(lambda: array(*blocks), array(*positions), SIZE)
    return finder.find(Prompt(0, np.zeros(40, np.int32)), 0, 39)


def test_a_copy_takes_its_tokens_from_the_source() -> None:
    matches = copy_of([7, 8, 9], 1, 5, 6)
    assert matches.pieces.rows() == [[0, 1, 7, 1, 1], [1, 2, 8, 1, 5]]
    assert (matches.num_tokens, matches.max_depth) == (3, 0)


def test_a_block_that_is_not_needed_may_be_missing() -> None:
    assert copy_of([7, -1, 9], 1, 9).num_tokens == 2


@pytest.mark.parametrize("blocks", [[7, -1, 9], [7]])
def test_without_its_source_nothing_is_copied(blocks: list[int]) -> None:
    assert copy_of(blocks, 1, 5).num_tokens == 0


def test_behind_a_prefix_hit_nothing_is_copied() -> None:
    """What stands there is not what the order says."""
    finder = CopyFinder(lambda: array(7), array(0, 1, 2), SIZE)
    assert finder.find(Prompt(0, np.zeros(40, np.int32)), 4, 39).num_tokens == 0


# Names.


class Others:
    """Finds what it was told."""

    is_exact = False
    halo = NO_HALO
    part = Finder.part

    def __init__(self, table: Sequence[Sequence[int]] = ()) -> None:
        pieces = Pieces.from_table(np.array(table, np.int32).reshape(-1, 5))
        self.found = Matches(pieces, pieces.num_tokens, len(pieces), 3)
        self.is_remembered = False

    def prepare(self, prompt: Prompt) -> None:
        pass

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        return self.found if self.is_remembered else None

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self.found

    def plan_stop(self, matches: Matches, stop: int) -> int:
        return stop


def finder(
    names: list[str], others: Others | None = None, **parts: list[FrozenPart]
) -> NamedFinder:
    return NamedFinder(others or Others(), names, parts.get, SIZE)


PROMPT = Prompt(0, array(9, 9, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 9))


def test_a_document_of_two_parts_is_one_run_of_tokens() -> None:
    parts = [part(1, 2, 3, 4, 5), part(6, 7, first_block=80)]
    matches = finder(["a"], a=parts).find(PROMPT, 0, 12)
    assert matches.pieces.rows() == [[2, 4, 50, 0, 0], [6, 1, 51, 0, 4], [7, 2, 80, 0, 0]]
    assert matches.num_tokens == 7


def test_what_is_in_the_prefix_hit_is_not_copied_again() -> None:
    matches = finder(["a"], a=[part(1, 2, 3, 4, 5, 6, 7)]).find(PROMPT, 4, 12)
    assert matches.pieces.rows() == [[4, 2, 50, 2, 2], [6, 3, 51, 0, 4]]


def test_the_rest_has_the_halo_that_its_finder_wants() -> None:
    others = Others()
    others.halo = Halo(8, 0.3)
    assert finder(["a"], others).halo == Halo(8, 0.3)


def test_the_rest_is_found_as_ever() -> None:
    others = Others([[0, 2, 3, 0, 7], [2, 2, 4, 0, 0], [9, 2, 5, 0, 9]])
    found = finder(["a"], others, a=[part(1, 2, 3)]).find(PROMPT, 0, 12)
    assert found.pieces.rows() == [[0, 2, 3, 0, 7], [2, 3, 50, 0, 0], [9, 2, 5, 0, 9]]
    assert (found.num_tokens, found.num_segments, found.max_depth) == (7, 3, 3)


def test_of_a_document_all_is_reused_or_nothing() -> None:
    others = Others([[0, 2, 3, 0, 7], [9, 2, 5, 0, 9]])
    one = finder(["a"], others, a=[part(1, 2, 3)])
    found = one.find(PROMPT, 0, 12)
    kept = np.array([True, True, False])
    left = one.part(PROMPT, found, kept, 0, 12)
    assert left is not None
    assert left.pieces.rows() == [[0, 2, 3, 0, 7], [2, 3, 50, 0, 0]]
    assert one.part(PROMPT, found, ~kept, 0, 12) is None
    assert finder(["b"], others).part(PROMPT, found, kept, 0, 12) is None, "it has gone meanwhile"


def test_what_the_others_remember_is_used() -> None:
    others = Others()
    one = finder(["a"], others, a=[part(1, 2, 3)])
    assert one.remembered(PROMPT, 0, 12) is None
    others.is_remembered = True
    found = one.remembered(PROMPT, 0, 12)
    assert found is not None
    assert found.num_tokens == 3


@pytest.mark.parametrize(
    "parts", [{}, {"b": [part(1, 2, 3)]}, {"a": [part(1, 2, 4)]}], ids=["cold", "other", "text"]
)
def test_a_document_that_is_not_there_is_not_taken_from_another(parts: dict[str, Any]) -> None:
    one = finder(["a"], **parts)
    assert one.find(PROMPT, 0, 12).num_tokens == 0
    assert one.first_place(PROMPT) == 0


def test_one_that_is_missing_leaves_all_of_them_to_be_computed() -> None:
    """Where the others stand is not known then: documents may have equal tokens."""
    one = finder(["b", "a"], a=[part(1, 2)])
    assert one.find(PROMPT, 0, 12).num_tokens == 0


def test_documents_with_equal_tokens_are_told_apart_by_their_order() -> None:
    one, two = [part(1, 2)], [part(1, 2, first_block=80)]
    assert finder(["a", "b"], a=one, b=two).find(PROMPT, 0, 12).pieces.block.tolist() == [50, 80]
    assert finder(["b", "a"], a=one, b=two).find(PROMPT, 0, 12).pieces.block.tolist() == [80, 50]


def test_the_first_place_is_that_of_the_first_document() -> None:
    assert finder(["a", "b"], a=[part(3, 4)], b=[part(6)]).first_place(PROMPT) == 4


# In the frozen pool.


@pytest.fixture
def pool() -> FrozenPool:
    return Pool()


def test_a_compressed_entry_is_found_whole_and_in_its_namespace_only(pool: FrozenPool) -> None:
    assert pool.compressed("a", 0) is None
    pool.add(order("a", 0, 2), part(1, 2, first_block=0))
    assert pool.compressed("a", 0) is None, "half of it"
    pool.add(order("a", 1, 2), part(3, first_block=1))
    parts = pool.compressed("a", 0)
    assert parts is not None
    assert [it.tokens.tolist() for it in parts if it.tokens is not None] == [[1, 2], [3]]
    assert pool.compressed("a", 1) is None, "another namespace"
    pool.release(["a"])
    assert pool.compressed("a", 0) is None


def test_a_text_is_no_compressed_entry(pool: FrozenPool) -> None:
    pool.add(order("a"), FrozenPart(0, [1], 7))
    assert pool.compressed("a", 0) is None


def test_an_evicted_one_returns_when_its_name_is_given(pool: FrozenPool) -> None:
    pool.add(order("a"), part(1, 2, first_block=0))
    pool.make_free(1)
    assert pool.compressed("a", 0) is None
    assert pool.wanted() == []
    pool.notice(0, lambda: np.arange(9, dtype=np.uint64))
    pool.named(1, ["a"])
    assert pool.wanted() == [], "of another namespace"
    pool.named(0, ["b", "a"])
    assert pool.wanted() == ["a"]
    check_integrity(pool)


# Orders.


@pytest.mark.parametrize(
    "value", [[0, 0, 1], [5, 2, 1], [2, 5, 0], [2, 5, 4], [-1, 5, 1], [1, 2], "x"]
)
def test_what_is_no_order_to_score_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ScoreOrder.parse(value)


@pytest.mark.parametrize("kept", [[], [2, 2], [3, 2], [-1], [4]])
def test_what_is_no_order_to_copy_is_refused(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="no order to copy"):
        CopyOrder.parse([[7, 8, 9, 10], kept])


@pytest.mark.parametrize(
    "one",
    [
        ScoreOrder(1, 9, 4),
        ScoreOrder(0, 1, 1),
        ScoreOrder(3, 9, 6),
        CopyOrder([7, 8, 9], [0, 2]),
        CopyOrder([7], [0]),
        AnchorOrder("a", 0, 1),
        AnchorOrder("a", 3, 9),
    ],
)
def test_an_order_survives_its_way(one: Any) -> None:
    parse: Callable[[Any], Any] = type(one).parse
    assert parse(one.encode()) == one


# Parts so far.


def test_what_was_kept_so_far_stands_behind_the_first_token() -> None:
    parts = [
        FrozenPart(0, [7], None, array(31, 32), 2),
        FrozenPart(0, [8, 9], None, array(33, 34), 2 * SIZE - 1),
    ]
    prompt = Prompt(0, array(1, 31, 32, 33, 34, 5, 6, 7))
    found = PartsFinder(lambda: parts, 4, SIZE).find(prompt, 0, 7)
    assert copied(found.pieces.rows()) == {
        1: (7, 2, 2),
        2: (7, 3, 3),
        3: (8, 3, 7),
        4: (9, 0, 8),
    }


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_of_what_was_kept_all_is_there_or_nothing(start: int, num_tokens: int) -> None:
    parts = [FrozenPart(0, [7], None, array(31, 32))]
    prompt = Prompt(0, array(1, 31, 32, 5, 6))
    found = PartsFinder(lambda: parts, num_tokens, SIZE).find(prompt, start, 4)
    assert found.num_tokens == (2 if (start, num_tokens) == (0, 2) else 0)
    assert PartsFinder(lambda: None, 2, SIZE).find(prompt, 0, 4).num_tokens == 0


def test_an_entry_that_is_not_whole_is_there_so_far() -> None:
    pool = Pool()
    pool.add(order("a", 0, 2), part(1, 2))
    assert pool.compressed("a", 0) is None
    assert len(pool.compressed("a", 0, so_far=True) or []) == 1
    assert pool.compressed("a", 1, so_far=True) is None, "another namespace"
    assert pool.compressed("b", 0, so_far=True) is None


@pytest.mark.parametrize("value", [["", 0, 1], ["a", -1, 1], ["a", 0, 0], ["a", 0], 7])
def test_an_order_to_keep_anchors_is_checked(value: Any) -> None:
    assert AnchorOrder.parse(AnchorOrder("a", 0, 1).encode()) == AnchorOrder("a", 0, 1)
    with pytest.raises((ValueError, TypeError)):
        AnchorOrder.parse(value)
