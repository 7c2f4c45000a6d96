# SPDX-License-Identifier: Apache-2.0
"""Signatures estimate the Jaccard similarity as datasketch's do; bands are datasketch's."""

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH

from segreuse_extras.similar.minhash import Permutations, bands_for, shingles

WIDTH, PLACES = 6, 128


def pairs(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Texts and edited ones, from equal to unrelated."""
    rng = np.random.default_rng(5)
    found = []
    for edits in np.linspace(0, 40, count).astype(int):
        text = rng.integers(0, 50_000, 200).astype(np.int32)
        other = text.copy()
        other[rng.integers(0, 200, edits)] = rng.integers(0, 50_000, edits)
        found.append((text, other))
    return found


def signature(text: np.ndarray) -> np.ndarray:
    hashes = shingles(text, WIDTH)
    ends = np.array([hashes.size], np.int32)
    return Permutations(PLACES).signatures(hashes, np.zeros(1, np.int32), ends)[0]


def jaccard(text: np.ndarray, other: np.ndarray) -> float:
    sets = [{tuple(it[i : i + WIDTH]) for i in range(it.size - WIDTH + 1)} for it in (text, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_equal_places_estimate_the_jaccard_similarity() -> None:
    errors = [
        float((signature(text) == signature(other)).mean()) - jaccard(text, other)
        for text, other in pairs(60)
    ]
    # One standard error of 128 places is .044 at most; 60 pairs average it out.
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.055


def test_the_estimate_is_as_good_as_that_of_datasketch() -> None:
    ours, theirs = [], []
    for text, other in pairs(30):
        sketches = []
        for one in (text, other):
            sketch = MinHash(num_perm=PLACES, seed=1)
            sketch.update_batch([shingle.tobytes() for shingle in shingles(one, WIDTH)])
            sketches.append(sketch)
        wanted = jaccard(text, other)
        theirs.append(sketches[0].jaccard(sketches[1]) - wanted)
        ours.append(float((signature(text) == signature(other)).mean()) - wanted)
    assert np.std(ours) < 1.5 * np.std(theirs)


def test_each_unit_has_the_signature_of_its_own_shingles() -> None:
    text, _ = pairs(1)[0]
    hashes = shingles(text, WIDTH)
    begins, ends = np.array([0, 40, 60, 7], np.int32), np.array([40, 90, 60, 8], np.int32)
    found = Permutations(PLACES).signatures(hashes, begins, ends)
    for row, begin, end in zip(found, begins, ends, strict=True):
        alone = Permutations(PLACES).signatures(
            hashes[begin:end].copy(), np.zeros(1, np.int32), np.array([end - begin], np.int32)
        )
        assert (row == alone[0]).all()
    assert (found[2] == 0xFFFFFFFF).all()  # nothing in it


def test_shingles_depend_on_order_and_on_nothing_outside() -> None:
    text = np.arange(20, dtype=np.int32)
    assert shingles(text, 6).size == 15
    assert shingles(text[:5], 6).size == 0
    assert shingles(text[3:9], 6) == shingles(text, 6)[3]
    assert shingles(text[::-1].copy(), 6)[0] not in shingles(text, 6)
    for i in range(6):
        other = text[:6].copy()
        other[i] += 1
        assert shingles(other, 6) != shingles(text[:6], 6)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8])
def test_bands_are_those_of_datasketch(threshold: float) -> None:
    lsh = MinHashLSH(threshold=threshold, num_perm=PLACES, weights=(0.2, 0.8))
    assert bands_for(threshold, PLACES) == (lsh.b, lsh.r)
    number, rows = bands_for(threshold, PLACES)
    assert number * rows <= PLACES
    assert 1 - (1 - (threshold + 0.1) ** rows) ** number > 0.8  # hardly one is missed above it


@pytest.mark.parametrize("permutations", [16, 17, 128, 1024])
@pytest.mark.parametrize("threshold", [0.95, 0.999, 1.0])
def test_any_threshold_that_options_allow_has_bands(threshold: float, permutations: int) -> None:
    """datasketch refuses to cut a signature for one so near 1 (at 128 places, from 0.999 on)."""
    number, rows = bands_for(threshold, permutations)
    assert number >= 2
    assert permutations // 2 < number * rows <= permutations
    assert bands_for(1.0, permutations) == (2, permutations // 2)
