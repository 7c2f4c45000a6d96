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


def reference(
    held: SegmentIndex,
    tokens: list[int],
    slots: list[int],
    free: list[bool],
    start: int,
    min_run: int,
    max_depth: int,
) -> tuple[list[list[int]], int, int, int]:
    """Position by position."""
    blocks = [slot // SIZE if slot >= 0 else -1 for slot in slots]
    nodes = held.nodes

    def holds(i: int) -> bool:
        node = nodes[blocks[i]]
        return (
            free[i]
            and blocks[i] >= 0
            and node["born"] not in (0, held.step)
            and node["depth"] <= max_depth
            and held.tokens[blocks[i], slots[i] % SIZE] == tokens[start + i]
        )

    def goes_on(i: int) -> bool:
        if slots[i] % SIZE:
            return slots[i] == slots[i - 1] + 1
        return slots[i - 1] % SIZE == SIZE - 1 and nodes[blocks[i]]["parent"] == blocks[i - 1]

    runs: list[list[int]] = []
    for i in filter(holds, range(len(slots))):
        if i and runs and runs[-1][-1] == i - 1 and goes_on(i):
            runs[-1].append(i)
        else:
            runs.append([i])
    runs = [run for run in runs if len(run) >= min_run]
    table: list[list[int]] = []
    for i in (i for run in runs for i in run):
        if table and blocks[i] == table[-1][2] and slots[i] == slots[i - 1] + 1 and holds(i - 1):
            table[-1][1] += 1
        else:
            offset = slots[i] % SIZE
            position = int(nodes[blocks[i]]["position"]) + offset
            table.append([start + i, 1, blocks[i], offset, position])
    depth = max((int(nodes[row[2]]["depth"]) for row in table), default=0)
    return table, sum(map(len, runs)), len(runs), depth


def test_pieces_are_those_of_a_loop_over_the_positions() -> None:
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(500):
        held = index(int(rng.integers(0, 3)) * SIZE)
        held.nodes["depth"][5:9] = rng.integers(0, 3, 4)
        if rng.random() < 0.3:
            held.remove([int(rng.integers(5, 9))])
        if rng.random() < 0.3:
            held.nodes["born"][rng.integers(5, 9)] = held.step
        start, slots, tokens = int(rng.integers(0, 4)), [], []
        while len(slots) < rng.integers(1, 20):
            first = int(rng.integers(0, 16))
            for i in range(first, min(first + int(rng.integers(1, 12)), 16)):
                slots.append(20 + i if rng.random() < 0.95 else -1)
                tokens.append(TEXT[i] if rng.random() < 0.95 else 7)
        free = (rng.random(len(slots)) < 0.95).tolist()
        given = held, [0] * start + tokens, slots, free, start
        limits = int(rng.integers(1, 5)), int(rng.integers(0, 3))
        found = filled(*given, *limits)
        assert found == reference(*given, *limits)
        seen.add(found[2:])
    assert len(seen) > 9
