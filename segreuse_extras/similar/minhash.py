# SPDX-License-Identifier: Apache-2.0
"""Signatures of shingles: the share of equal places estimates the Jaccard similarity (Broder,
"On the resemblance and containment of documents", SEQUENCES 1997).

The permutations are the same in every process, so that the same prompts find the same donors.

datasketch chooses the bands. Its `MinHash` is not used: it is one Python object per window, and at
128 permutations took 21 to 39 times as long as the loop below (prompts of 2,048 and 8,192 tokens,
windows of 64 and 512; one core, measured in turns). A request waits for its signatures.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from datasketch import MinHashLSH

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.plan import IntArray

Hashes = npt.NDArray[np.uint32]
"""uint32: shingles `[n]`, or signatures `[units, permutations]`."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HALF, _SEED = np.uint64(32), 20

_FALSE_POSITIVE, _FALSE_NEGATIVE = 0.2, 0.8
"""A candidate too many costs an alignment, one too few the reuse."""


class Bands(NamedTuple):
    """How a signature is cut: so many bands of `rows` places each."""

    number: int
    rows: int


def bands_for(threshold: float, permutations: int) -> Bands:
    """The cut that errs least around a Jaccard similarity, as datasketch computes it; into halves
    for one so near 1 that it refuses to compute any."""
    weights = _FALSE_POSITIVE, _FALSE_NEGATIVE
    try:
        lsh = MinHashLSH(threshold=threshold, num_perm=permutations, weights=weights)
    except ValueError:  # of one band
        return Bands(2, permutations // 2)
    return Bands(lsh.b, lsh.r)


class Permutations:
    """As many as a signature has places.

    Args:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        draw = np.random.default_rng(_SEED)
        self._factors: Hashes = draw.integers(0, 2**32, count, np.uint32) | np.uint32(1)
        self._masks: Hashes = draw.integers(0, 2**32, count, np.uint32)

    def signatures(self, shingles: Hashes, begins: IntArray, ends: IntArray) -> Hashes:
        """Of each range of shingles; all ones for an empty range.

        Args:
            begins, ends: int32 `[units]`.

        Returns:
            uint32 `[units, permutations]`.
        """
        return _signatures(shingles, begins, ends, self._factors, self._masks)


def shingles(ids: IntArray, width: int) -> Hashes:
    """Hashes of all stretches of so many classes: uint32 `[max(0, n - width + 1)]`."""
    return _shingles(np.require(ids, np.int32, ("C", "W")), width)


@kernel
def _shingles(ids: IntArray, width: int) -> Hashes:
    hashes = np.empty(max(0, ids.size - width + 1), np.uint32)
    for i in range(hashes.size):
        value = np.uint64(0)
        for j in range(width):
            value = (value ^ np.uint64(np.uint32(ids[i + j]))) * _BASE
            value ^= value >> _HALF
        hashes[i] = np.uint32((value * _MIX) >> _HALF)
    return hashes


@kernel
def _signatures(
    shingles: Hashes, begins: IntArray, ends: IntArray, factors: Hashes, masks: Hashes
) -> Hashes:
    found = np.full((begins.size, factors.size), np.uint32(0xFFFFFFFF), np.uint32)
    for unit in range(begins.size):
        row = found[unit]
        for i in range(begins[unit], ends[unit]):
            shingle = shingles[i]
            for place in range(factors.size):
                value = np.uint32(np.uint32(shingle ^ masks[place]) * factors[place])
                value = np.uint32(value ^ (value >> np.uint32(15)))
                row[place] = min(row[place], value)
    return found
