# SPDX-License-Identifier: Apache-2.0
"""Which windows of a text are compared, and which of their candidates are aligned."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from segreuse_extras.similar.canonical import Vocabulary
from segreuse_extras.similar.options import SimilarityOptions
from segreuse_extras.similar.store import CONTEXT_PLACES, SimilarStore, Units, _positions
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable

WINDOW, STRIDE, SHINGLE = 24, 8, 3


def store(*anchors: list[int]) -> SimilarStore:
    options = SimilarityOptions(
        window_tokens=WINDOW, stride_tokens=STRIDE, shingle_tokens=SHINGLE, permutations=16
    )
    vocabulary = Vocabulary.of_identity().with_anchors(anchors)
    return SimilarStore(SegmentIndex(8, 16), NamespaceTable(), vocabulary, options)


def units(kept: SimilarStore, ids: np.ndarray, ends: list[int], **given: Any) -> list[list[int]]:
    ends_here = np.array(ends, np.int32)
    found = kept._with_segments(ids, ends_here, given.get("begin", 0), given.get("first"))
    assert found.begins.dtype == found.ends.dtype == np.int32
    return np.stack(found, axis=1).tolist()


def test_windows_are_as_long_as_they_may_be_and_two_shingles_at_least() -> None:
    ids = np.arange(100, dtype=np.int32)
    assert units(store(), ids, [5, 6, 23, 24, 25, 60]) == [
        [0, 6],
        [0, 23],
        [0, 24],
        [1, 25],
        [36, 60],
    ]


def test_segments_reach_from_one_anchor_to_the_next_but_no_longer_than_a_window() -> None:
    ids = np.arange(1000, 1100, dtype=np.int32)
    for at in (7, 12, 18, 50, 60):
        ids[at : at + 2] = 1, 2
    ids = Vocabulary.of_identity().canonical(ids)[0]
    kept = store([1, 2])
    assert units(kept, ids, []) == [[0, 7], [12, 18], [26, 50], [50, 60]]
    first = np.arange(0, 200, 2, dtype=np.int32)  # each stands for two tokens
    assert units(kept, ids, [], begin=36, first=first) == [[12, 18], [26, 50], [50, 60]]
    assert units(kept, ids, [], begin=37, first=first) == [[26, 50], [50, 60]]
    assert units(kept, ids, [30], begin=101, first=first) == [[6, 30], [50, 60]]
    assert units(kept, ids, [], begin=121, first=first) == []


def test_anchors_are_found_at_both_ends_and_nowhere_else() -> None:
    kept = store([1, 2], [3])
    ids = Vocabulary.of_identity().canonical(np.array([1, 2, 1, 1, 2, 9, 3, 1, 2], np.int32))[0]
    assert kept._anchors(ids).tolist() == [0, 3, 6, 7]
    assert kept._anchors(ids[:1]).tolist() == []
    assert kept._anchors(ids[:0]).tolist() == []
    assert kept._anchors(ids[:-1]).tolist() == [0, 3, 6]


def test_units_begin_and_end_at_tokens() -> None:
    first, bounds = np.array([0, 2, 5], np.int32), Units(np.array([0, 1, 3]), np.array([3, 2, 3]))
    begins, ends = _positions(first, 9, bounds)
    assert (begins.tolist(), ends.tolist()) == ([0, 2, 9], [9, 5, 9])


def test_the_best_two_donors_of_each_stretch_are_aligned() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        number, width = int(rng.integers(0, 12)), 5
        rows = np.sort(rng.integers(0, 6, number))
        counts = rng.permutation(16 * CONTEXT_PLACES)[:number]  # no two are equally similar
        table = np.stack(
            (
                rows,
                rng.integers(0, width, number),
                counts // CONTEXT_PLACES,
                counts % CONTEXT_PLACES,
            ),
            axis=1,
        ).astype(np.int32)
        ends = np.cumsum(rng.integers(1, 2 * STRIDE, 6))
        like = SimpleNamespace(
            options=SimpleNamespace(permutations=16, stride_tokens=STRIDE),
            windows=SimpleNamespace(block=np.zeros(width)),
        )
        found = SimilarStore._best(like, table, ends).tolist()  # type: ignore[arg-type]
        expected = []
        for stretch in sorted({int(end) // STRIDE for end in ends}):
            mine = [row for row in table.tolist() if ends[row[0]] // STRIDE == stretch]
            mine.sort(key=lambda row: -row[2] / 16 - row[3] / CONTEXT_PLACES)
            of_donor = {row[1]: row for row in reversed(mine)}  # the best of each
            best = [row for row in mine if of_donor[row[1]] == row]
            expected += best[:2]
        assert found == expected
