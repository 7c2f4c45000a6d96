# SPDX-License-Identifier: Apache-2.0
"""Slots become pieces only where the donor holds the prompt's own token, in long enough runs."""

import numpy as np

from segreuse_extras.similar.fill import fill
from vllm_segreuse.cache.index import SegmentIndex

SIZE, NAMESPACE = 4, 3
TEXT = [*range(100, 116)]


def index(position: int = 40) -> SegmentIndex:
    """Four blocks of one sequence, 5 to 8."""
    held = SegmentIndex(10, SIZE)
    held.insert(NAMESPACE, np.arange(5, 9, dtype=np.int32), np.array(TEXT, np.int32), position)
    held.begin_step()
    return held


def filled(
    held: SegmentIndex,
    tokens: list[int],
    slots: list[int],
    free: list[bool] | None = None,
    start: int = 0,
    min_run: int = 1,
    max_depth: int = 0,
) -> tuple[list[list[int]], int, int, int]:
    given = np.array(slots, np.int32)
    wanted = np.ones(given.size, np.bool_) if free is None else np.array(free, np.bool_)
    table, begins, depth = fill(
        held.nodes,
        held.tokens,
        np.array(tokens, np.int32),
        given,
        held.entries(NAMESPACE, np.where(given < 0, -1, given // SIZE).astype(np.int32)),
        wanted,
        start,
        held.step,
        max_depth,
        min_run,
    )
    assert begins.size == len(table)
    return table.tolist(), int(table[:, 1].sum()), int(begins.sum()), depth


def slots_of(first: int, count: int) -> list[int]:
    return [5 * SIZE + first + i for i in range(count)]


def test_runs_go_on_from_block_to_block() -> None:
    table, tokens, runs, depth = filled(index(), TEXT[2:11], slots_of(2, 9))
    assert table == [[0, 2, 5, 2, 42], [2, 4, 6, 0, 44], [6, 3, 7, 0, 48]]
    assert (tokens, runs, depth) == (9, 1, 0)


def test_another_token_is_never_taken() -> None:
    tokens = [*TEXT[:3], 7, *TEXT[4:8]]
    table, number, runs, _ = filled(index(), tokens, slots_of(0, 8))
    assert table == [[0, 3, 5, 0, 40], [4, 4, 6, 0, 44]]
    assert (number, runs) == (7, 2)


def test_short_runs_are_dropped() -> None:
    tokens = [*TEXT[:3], 7, *TEXT[4:8]]
    table, number, runs, _ = filled(index(), tokens, slots_of(0, 8), min_run=4)
    assert table == [[4, 4, 6, 0, 44]]
    assert (number, runs) == (4, 1)


def test_only_what_is_free_is_filled() -> None:
    free = [True] * 3 + [False] * 2 + [True] * 4
    table, number, runs, _ = filled(index(), [0, 0, *TEXT[:9]], slots_of(0, 9), free, start=2)
    assert table == [[2, 3, 5, 0, 40], [7, 3, 6, 1, 45], [10, 1, 7, 0, 48]]
    assert (number, runs) == (7, 2)


def test_blocks_that_do_not_follow_each_other_are_two_runs() -> None:
    held = index()
    slots = [*slots_of(0, 4), *slots_of(8, 4)]
    assert filled(held, [*TEXT[:4], *TEXT[8:12]], slots)[2] == 2
    held.remove([6])  # and neither do those between which one is gone
    assert filled(held, TEXT, slots_of(0, 16))[1:3] == (12, 2)
    alone = SegmentIndex(10, SIZE)
    for block in (5, 6):  # side by side by chance
        tokens = np.array(TEXT[(block - 5) * SIZE :][:SIZE], np.int32)
        alone.insert(NAMESPACE, np.array([block], np.int32), tokens, 40 * block)
    alone.begin_step()
    assert filled(alone, TEXT[:8], slots_of(0, 8))[1:3] == (8, 2)


def test_holes_end_a_run() -> None:
    slots = slots_of(0, 8)
    slots[2] = -1
    table, number, runs, _ = filled(index(), TEXT[:8], slots)
    assert (number, runs) == (7, 2)
    assert [row[0] for row in table] == [0, 3, 4]


def test_fresh_and_deep_blocks_are_left_out() -> None:
    held = index()
    held.nodes["depth"][6] = 1
    assert filled(held, TEXT, slots_of(0, 16))[1:] == (12, 2, 0)
    assert filled(held, TEXT, slots_of(0, 16), max_depth=1)[1:] == (16, 1, 1)
    # What is dropped for its length does not make the rest deeper.
    assert filled(held, [*TEXT[:3], 7, *TEXT[4:6]], slots_of(0, 6), max_depth=1, min_run=3)[3] == 0
    held.nodes["born"][7] = held.step
    assert filled(held, TEXT, slots_of(0, 16))[1:] == (8, 2, 0)
