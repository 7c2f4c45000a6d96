# SPDX-License-Identifier: Apache-2.0
"""Of donors for which there is no room, those go first of which the least is read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.plan import Pieces, Tier
from vllm_segreuse.scheduling.fitting import kept_without

FAR = 1000  # behind every piece


def blocks_of(pieces: Pieces) -> set[int]:
    return set(pieces.block[pieces.source == Tier.GPU].tolist())


@st.composite
def some_pieces(draw: st.DrawFn) -> Pieces:
    """Of blocks that may be read at several places, in both tiers."""
    at, table = 0, []
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.integers(0, 2))
        length = draw(st.integers(1, 4))
        table.append((at, length, draw(st.integers(0, 8)), 0, draw(st.integers(0, 40))))
        at += length
    source = draw(st.lists(st.sampled_from(Tier), min_size=len(table), max_size=len(table)))
    gpu = Pieces.from_table([row for row, of in zip(table, source, strict=True) if of == Tier.GPU])
    host = [row for row, of in zip(table, source, strict=True) if of == Tier.HOST]
    return gpu.merged(Pieces.from_table(host, source=Tier.HOST))


@given(some_pieces(), st.sets(st.integers(0, 8)), st.integers(0, 9), st.integers(0, 60))
def test_as_many_go_as_have_to_and_those_of_which_the_least_is_read(
    pieces: Pieces, idle: set[int], missing: int, exact_until: int
) -> None:
    kept = kept_without(pieces, idle, missing, exact_until, from_end=False)
    idle = idle & blocks_of(pieces)
    left, lost = pieces.where(kept), pieces.where(~kept)
    assert (lost.source == Tier.GPU).all()
    gone = blocks_of(lost)
    assert gone == idle - blocks_of(left), "a block is read, or it is not"
    assert len(gone) == min(missing, len(idle))

    def read(block: int) -> tuple[bool, int]:
        of = pieces.where((pieces.block == block) & (pieces.source == Tier.GPU))
        return bool((of.destination < exact_until).any()), of.num_tokens

    best_gone = max(map(read, gone), default=(False, 0))
    assert all(read(block) >= best_gone for block in idle - gone)


def test_a_segment_keeps_its_beginning_and_the_smaller_segment_goes() -> None:
    table = [[0, 4, 1, 0, 40], [4, 4, 2, 0, 44], [8, 4, 3, 0, 48]]  # one segment
    table += [[20, 4, 4, 0, 90], [24, 4, 5, 0, 94]]  # and another
    pieces = Pieces.from_table(table)
    gone = [kept_without(pieces, range(9), n, 0, from_end=False).tolist() for n in (1, 2, 3)]
    assert gone[0] == [True, True, True, True, False]
    assert gone[1] == [True, True, True, False, False]
    assert gone[2] == [True, True, False, False, False]


def test_similar_text_goes_first_and_what_is_restored_last() -> None:
    equal = Pieces.from_table([[0, 4, 1, 0, 0], [20, 4, 2, 0, 40], [30, 4, 3, 0, 60]])
    similar = Pieces.from_table([[40, 4, 4, 0, 80]], is_similar=True)
    pieces = equal.merged(similar)
    orders = [kept_without(pieces, range(9), n, 4, from_end=False).tolist() for n in (1, 2, 3)]
    assert orders[0] == [True, True, True, False]
    assert orders[1] == [True, True, False, False]
    assert orders[2] == [True, False, False, False]


def test_a_block_that_is_read_twice_is_worth_both() -> None:
    pieces = Pieces.from_table([[0, 3, 1, 0, 0], [5, 4, 2, 0, 20], [10, 3, 1, 0, 0]])
    assert kept_without(pieces, {1, 2}, 1, 0, from_end=False).tolist() == [True, False, True]


def test_from_the_end_it_goes_whatever_it_is() -> None:
    pieces = Pieces.from_table([[0, 1, 1, 0, 0], [5, 2, 2, 0, 20], [10, 4, 3, 0, 40]])
    assert kept_without(pieces, {1, 2, 3}, 1, FAR, from_end=True).tolist() == [True, True, False]
    assert np.flatnonzero(kept_without(pieces, {1, 2}, 1, 0, from_end=True)).tolist() == [0, 2]
