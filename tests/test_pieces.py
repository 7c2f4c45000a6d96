# SPDX-License-Identifier: Apache-2.0
"""What pieces say of themselves, counted by hand."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.plan import Pieces, Tier

START = 8


def pieces(*rows: tuple[int, int, int]) -> Pieces:
    """(destination, length, donor position) of each piece, of as many blocks."""
    return Pieces.from_table(
        [(to, length, 70 + number, 0, at) for number, (to, length, at) in enumerate(rows)]
    )


@pytest.mark.parametrize(
    ("rows", "segments"),
    [
        ([], ([], [])),
        ([(8, 4, 0)], ([0], [0])),
        ([(8, 4, 0), (12, 4, 4)], ([0], [0])),  # follow each other here and there
        ([(8, 4, 0), (12, 4, 5)], ([0, 4], [0, 5])),  # here only
        ([(8, 4, 0), (13, 4, 5)], ([0, 5], [0, 5])),  # there only, with a token between them
        ([(10, 2, 7), (12, 3, 9), (20, 1, 17)], ([2, 12], [7, 17])),
    ],
)
def test_a_segment_begins_where_tokens_did_not_follow_each_other(
    rows: list[tuple[int, int, int]], segments: tuple[list[int], list[int]]
) -> None:
    """And where in its own sequence it did."""
    found = pieces(*rows).segments(START)
    assert (found.first.tolist(), found.position.tolist()) == segments


def test_a_segment_begins_where_the_donor_is_known_to_be_another() -> None:
    rows = [[8, 4, 70, 0, 0], [12, 4, 71, 0, 4], [16, 4, 72, 0, 8]]
    found = Pieces.from_table(rows, begins=[True, False, True])
    assert found.segments(START).first.tolist() == [0, 8]
    assert found.where(np.array([False, True, True])).segments(START).first.tolist() == [4, 8]
    behind = np.zeros((100, 4), np.int32)
    behind[72, 2:] = 1  # an image within the last piece
    parts = found.turned(behind, None)
    assert parts.begins.tolist() == [True, False, True, False]
    assert parts.segments(START).first.tolist() == [0, 8]


def test_short_segments_are_dropped_whole() -> None:
    rows = [[8, 2, 70, 0, 0], [10, 2, 71, 0, 2], [20, 3, 72, 0, 9], [30, 4, 73, 0, 9]]
    found = Pieces.from_table(rows, is_similar=True)
    assert found.of_segments_above(3).rows() == [rows[0], rows[1], rows[3]]
    assert found.of_segments_above(4).rows() == []
    assert Pieces.from_table([]).of_segments_above(0).rows() == []


def test_what_goes_behind_a_position_begins_within_a_piece() -> None:
    found = pieces((8, 4, 0), (20, 3, 7))
    assert found.behind(8).rows() == found.rows()
    assert found.behind(12).rows() == [[20, 3, 71, 0, 7]]
    [first, rest] = found.behind(10).rows()
    assert first == [10, 2, 70, 2, 2]
    assert rest == [20, 3, 71, 0, 7]
    assert found.behind(23).rows() == []
    assert found.behind(10).kept.tolist() == [int(found.kept[0]) + 2, int(found.kept[1])]


def test_segments_are_numbered_from_0_on() -> None:
    rows = [[8, 2, 70, 0, 0], [10, 2, 71, 0, 2], [20, 3, 72, 0, 9], [30, 4, 73, 0, 9]]
    assert Pieces.from_table(rows, is_similar=True).segment.tolist() == [0, 0, 1, 2]


def test_similar_pieces_take_their_place_among_others() -> None:
    equal = pieces((8, 4, 0), (20, 3, 7))
    similar = Pieces.from_table([[30, 2, 9, 1, 5], [12, 4, 8, 0, 4]], is_similar=True)
    both = equal.merged(similar)
    assert both.rows() == [
        [8, 4, 70, 0, 0],
        [12, 4, 8, 0, 4],
        [20, 3, 71, 0, 7],
        [30, 2, 9, 1, 5],
    ]
    assert both.is_similar.tolist() == [False, True, False, True]
    assert both.source.tolist() == [Tier.GPU] * 4
    assert (both.num_tokens, both.num_similar) == (13, 6)
    assert (equal.num_similar, similar.num_similar) == (0, 6)
    # What was found in two ways is two segments, also where the positions go on.
    assert both.segments(START).first.tolist() == [0, 4, 12, 22]


def test_similar_segments_are_runs_of_similar_pieces() -> None:
    assert [it.tolist() for it in pieces((8, 4, 0)).similar_segments(START)] == [[], []]
    assert [it.tolist() for it in pieces().similar_segments(START)] == [[], []]
    similar = [[12, 4, 8, 0, 4], [16, 2, 9, 0, 8], [30, 2, 9, 1, 5], [32, 1, 9, 3, 9]]
    both = pieces((8, 4, 0), (20, 3, 7)).merged(Pieces.from_table(similar, is_similar=True))
    first, stop = both.similar_segments(START)
    assert (first.tolist(), stop.tolist()) == ([4, 22, 24], [10, 24, 25])
    assert set(first.tolist()) <= set(both.segments(START).first.tolist())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=8), st.integers(0, 20))
def test_reused_are_the_tokens_of_the_pieces(runs: list[tuple[int, int]], start: int) -> None:
    rows, expected = [], []
    for gap, length in runs:
        expected += [False] * gap
        rows.append((start + len(expected), length, 0))
        expected += [True] * length
    stop = start + len(expected) + 3
    found = pieces(*rows)
    assert found.reused(start, stop).tolist() == [*expected, False, False, False]
    assert found.num_tokens == sum(expected)
    assert found.stop == (start + len(expected) if rows else 0)


def test_a_block_that_is_read_twice_is_one_donor() -> None:
    found = Pieces.from_table([(0, 2, 4, 0, 0), (2, 2, 9, 1, 5), (6, 1, 4, 3, 3)])
    assert found.donor_blocks == [9, 4]


def test_donors_are_evicted_from_the_end_of_their_sequence() -> None:
    """Its beginning is what vLLM finds the rest behind."""
    table = [(8, 4, 1, 0, 0), (12, 4, 2, 0, 4), (16, 4, 7, 0, 4), (20, 4, 6, 0, 8)]
    found = Pieces.from_table(table)
    assert found.donor_blocks == [6, 2, 7, 1]


def test_blocks_of_another_tier_are_no_donors_of_vllms_pool() -> None:
    found = Pieces.from_table([(0, 2, 9, 0, 0), (2, 3, 4, 1, 5), (6, 1, 9, 3, 3)])
    found.source[1] = Tier.HOST
    assert found.donor_blocks == [9]
    assert found.num_tiered == 3
    assert found.where(found.source == Tier.HOST).rows() == [[2, 3, 4, 1, 5]]


def test_a_table_becomes_columns_and_rows_again() -> None:
    rows = [[3, 2, 7, 1, 41], [5, 4, 8, 0, 43]]
    found = pickle.loads(pickle.dumps(Pieces.from_table(rows)))
    assert found.destination.tolist() == [3, 5]
    assert found.length.tolist() == [2, 4]
    assert found.block.tolist() == [7, 8]
    assert found.offset.tolist() == [1, 0]
    assert found.position.tolist() == [41, 43]
    assert found.source.tolist() == [Tier.GPU, Tier.GPU]
    assert found.rows() == rows
    assert len(found) == 2
    nothing = Pieces.from_table([])
    assert (len(nothing), nothing.num_tokens, nothing.rows()) == (0, 0, [])
