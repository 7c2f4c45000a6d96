# SPDX-License-Identifier: Apache-2.0
"""Windows are found by similar signatures of their namespace, and go with their blocks."""

from functools import cache

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from segreuse_extras.similar.minhash import bands_for
from segreuse_extras.similar.windows import Marks, Windows

PLACES, CONTEXT = 32, 8
BLOCKS = 40
MINE, THEIRS = 2**60 + 7, 2**61 + 9


def windows(capacity: int = 64) -> Windows:
    return Windows(BLOCKS, capacity, PLACES, CONTEXT, bands_for(0.5, PLACES))


def marks(*seeds: int, equal: int = PLACES, context: int = 0) -> Marks:
    """Signatures by seed, the first places of which are those of the seed."""
    rows, fronts = [], []
    for seed in seeds:
        rows.append(np.append(drawn(seed, PLACES)[:equal], drawn(seed + 10**6, PLACES - equal)))
        fronts.append(drawn(seed + context, CONTEXT))
    return Marks(np.array(rows), np.array(fronts))


@cache  # the model below looks for all of its seeds after every step
def drawn(seed: int, places: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, places, np.uint32)


def insert(kept: Windows, salt: int, seed: int, block: int, context: int = 0) -> None:
    kept.insert(
        salt, marks(seed, context=context), np.array([block], np.int32), np.array([9], np.int32)
    )


def found(kept: Windows, salt: int, *seeds: int, equal: int = PLACES) -> list[list[int]]:
    """Row and block of each candidate."""
    table = kept.look_up(salt, marks(*seeds, equal=equal), 0.5)
    return [[row, int(kept.block[window])] for row, window, *_ in table.tolist()]


def test_similar_windows_are_found_and_others_are_not() -> None:
    kept = windows()
    for seed in range(20):
        insert(kept, MINE, seed, seed)
    assert found(kept, MINE, 3, 99, 7) == [[0, 3], [2, 7]]
    assert found(kept, MINE, 3, equal=28) == [[0, 3]]
    assert found(kept, MINE, 3, equal=10) == []
    assert kept.length[kept.block == 3] == 9


def test_how_similar_text_and_context_are_is_counted() -> None:
    kept = windows()
    insert(kept, MINE, 3, 0)
    insert(kept, MINE, 3, 1, context=5)
    table = kept.look_up(MINE, marks(3, equal=28), 0.5)
    by_block = {int(kept.block[window]): (text, front) for _, window, text, front in table.tolist()}
    assert by_block[0] == (28, CONTEXT)
    assert by_block[1] == (28, 0)


def test_namespaces_do_not_meet() -> None:
    kept = windows()
    insert(kept, THEIRS, 3, 0)
    assert found(kept, MINE, 3) == []
    assert found(kept, THEIRS, 3) == [[0, 0]]


def test_other_namespaces_do_not_displace_windows() -> None:
    kept = windows()
    insert(kept, MINE, 3, 0)
    for block in range(1, 8):
        insert(kept, THEIRS, 3, block)
    assert found(kept, MINE, 3) == [[0, 0]]


def test_a_place_that_another_namespace_took_over_is_nobodys() -> None:
    """The windows of a block are gone, and the first one in its place is somebody else's."""
    kept = windows(capacity=1)
    insert(kept, MINE, 3, 0)
    kept.remove(0)
    insert(kept, THEIRS, 3, 1)
    assert found(kept, MINE, 3) == []
    assert found(kept, THEIRS, 3) == [[0, 1]]


def test_a_window_goes_with_its_block() -> None:
    kept = windows()
    for seed, block in enumerate((4, 5, 4, 6, 4)):
        insert(kept, MINE, seed, block)
    kept.remove(4)
    kept.remove(4)
    kept.remove(39)
    assert len(kept) == 2
    assert found(kept, MINE, *range(5)) == [[1, 5], [3, 6]]


def test_memory_is_bounded_and_the_oldest_windows_are_dropped() -> None:
    kept = windows(capacity=8)
    reserved = kept.num_bytes
    for seed in range(30):
        insert(kept, MINE, seed, seed % BLOCKS)
    assert len(kept) == 8
    assert kept.num_bytes == reserved
    assert [block for _, block in found(kept, MINE, *range(30))] == [*range(22, 30)]


def test_released_windows_are_used_before_others_are_dropped() -> None:
    kept = windows(capacity=4)
    for seed in range(4):
        insert(kept, MINE, seed, seed)
    kept.remove(2)
    insert(kept, MINE, 10, 10)
    assert [block for _, block in found(kept, MINE, 0, 1, 2, 3, 10)] == [0, 1, 3, 10]


def test_text_that_is_kept_often_costs_no_more() -> None:
    kept = windows()
    for block in range(BLOCKS):
        insert(kept, MINE, 3, block)
    assert [block for _, block in found(kept, MINE, 3)] == [39, 38, 37, 36]  # the newest


def test_nothing_is_found_in_what_is_empty() -> None:
    kept = windows()
    assert found(kept, MINE, 3) == []
    insert(kept, MINE, 3, 0)
    kept.clear()
    assert found(kept, MINE, 3) == []
    assert len(kept) == 0
    nothing = Marks(np.empty((0, PLACES), np.uint32), np.empty((0, CONTEXT), np.uint32))
    insert(kept, MINE, 3, 0)
    assert kept.look_up(MINE, nothing, 0.5).shape == (0, 4)


class Model(RuleBasedStateMachine):
    """Against a dictionary of what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = windows(capacity=200)
        self.known: dict[tuple[int, int], int] = {}  # (salt, seed) to block

    @rule(salt=st.sampled_from([MINE, THEIRS]), seed=st.integers(0, 50), block=st.integers(0, 39))
    def keep(self, salt: int, seed: int, block: int) -> None:
        if (salt, seed) not in self.known:
            insert(self.kept, salt, seed, block)
            self.known[salt, seed] = block

    @rule(block=st.integers(0, 39))
    def remove(self, block: int) -> None:
        self.kept.remove(block)
        self.known = {key: it for key, it in self.known.items() if it != block}

    @rule()
    def clear(self) -> None:
        self.kept.clear()
        self.known.clear()

    @invariant()
    def what_is_found_was_kept(self) -> None:
        assert len(self.kept) == len(self.known)
        for salt in (MINE, THEIRS):
            wanted = [[i, self.known[salt, i]] for i in range(51) if (salt, i) in self.known]
            assert found(self.kept, salt, *range(51)) == wanted


TestModel = Model.TestCase


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_the_threshold_is_that_of_the_estimate(threshold: float) -> None:
    kept = windows()
    insert(kept, MINE, 3, 0)
    for equal in range(16, PLACES + 1):
        table = kept.look_up(MINE, marks(3, equal=equal), threshold)
        # Eight bits agree by chance now and then, and few equal places may miss every band.
        if equal / PLACES < threshold - 0.05:
            assert table.size == 0
        if equal / PLACES > threshold + 0.05:
            assert table.size == 4


def folded(places: np.ndarray) -> np.ndarray:
    """The eight bits that are kept of each place."""
    return (places.astype(np.uint64) * 0x9E3779B1 % 2**32 >> 24).astype(np.uint8)


def test_of_many_candidates_the_most_similar_are_found() -> None:
    rng, (bands, rows) = np.random.default_rng(1), bands_for(0.5, PLACES)
    crowded = 0
    for _ in range(60):
        kept = windows(capacity=2**16)  # others are in other buckets
        target, front = (rng.integers(0, 2**32, n, np.uint32) for n in (PLACES, CONTEXT))
        texts, fronts, met = [], [], []
        for block in range(BLOCKS - 1):
            text = rng.integers(0, 2**32, PLACES, np.uint32)
            for band in rng.choice(bands, int(rng.integers(0, 4)), replace=False):
                text[band * rows : (band + 1) * rows] = target[band * rows : (band + 1) * rows]
                met.append((band, block))
            context = np.where(rng.random(CONTEXT) < 0.5, front, 0).astype(np.uint32)
            texts.append(text)
            fronts.append(context)
            one = Marks(text[None], context[None])
            kept.insert(MINE, one, np.array([block], np.int32), np.array([9], np.int32))
        by_band = [[block for at, block in met if at == band] for band in range(bands)]
        newest = {block for blocks in by_band for block in blocks[-4:]}
        equal = (folded(np.array(texts)) == folded(target)).sum(axis=1)
        same = (folded(np.array(fronts)) == folded(front)).sum(axis=1)
        table = kept.look_up(
            MINE, Marks(np.stack([~target, target]), np.stack([front, front])), 0.15
        )
        blocks = kept.block[table[:, 1]]
        assert table[:, 0].tolist() == [1] * len(table)
        assert table[:, 2].tolist() == equal[blocks].tolist()
        assert table[:, 3].tolist() == same[blocks].tolist()
        likely = [block for block in newest if equal[block] >= 5]  # 32 * 0.15, and by chance
        assert len(set(blocks.tolist())) == len(blocks)
        assert set(blocks.tolist()) <= set(likely)
        best = sorted(equal[likely].tolist(), reverse=True)[:8]
        assert sorted(equal[blocks].tolist(), reverse=True) == best
        crowded += len(likely) > 8
    assert crowded > 10
