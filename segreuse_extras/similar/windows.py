# SPDX-License-Identifier: Apache-2.0
"""Signatures of donors' text, by the block that each window of it ends in (locality-sensitive
hashing).

    band 0   bucket | tag, window | tag, window | ...      a window is in one bucket of every band;
    band 1   bucket | tag, window | ...                    a full bucket drops its oldest

A window goes with its block, at once: its places in buckets then name no window of anybody, or
another, which the signature tells apart. Of a signature only eight bits of each place are kept,
which agree by chance in one of 256 (b-bit minwise hashing: Li and König, WWW 2010).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from segreuse_extras.similar.minhash import Bands, Hashes
from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.plan import IntArray

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.uint32]

WAYS = 4  # windows in a bucket
MOST = 8  # candidates of one unit
_CHANCE = 1 / 256

OLDEST, FREE, IN_USE = range(3)
"""State: the next window to be dropped, or used for the first time; the first that was released,
plus one; how many are in use."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT, _HALF = np.uint64(29), np.uint64(32)


class Marks(NamedTuple):
    """What windows are compared by, one row each.

    Attributes:
        text: uint32 `[n, permutations]`, signatures of the windows.
        context: uint32 `[n, places]`, of the text in front of them.
    """

    text: Hashes
    context: Hashes


class Windows:
    """Windows of donors in all namespaces; one per engine, of the scheduler's thread.

    Args:
        num_blocks: of the pool.
        capacity: windows that are kept; the oldest ones are dropped for others.
        permutations, context_places: of the signatures.
        bands: how signatures are cut.

    Attributes:
        block: int32 `[capacity]`, the block that each window ends in; -1: not in use.
        length: int32 `[capacity]`, tokens from its beginning to the end of that block.
    """

    def __init__(
        self, num_blocks: int, capacity: int, permutations: int, context_places: int, bands: Bands
    ) -> None:
        self._num_blocks = num_blocks
        self._capacity = capacity
        self._widths = permutations, context_places
        self._bands = bands
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        capacity, (permutations, context_places) = self._capacity, self._widths
        buckets = max(1, 1 << (2 * capacity // WAYS - 1).bit_length())
        self.block: IntArray = np.full(capacity, -1, np.int32)
        self.length: IntArray = np.zeros(capacity, np.int32)
        self._salts = np.zeros(capacity, np.uint64)
        self._text: Bytes = np.zeros((capacity, permutations), np.uint8)
        self._context: Bytes = np.zeros((capacity, context_places), np.uint8)
        # Windows of a block, and the free ones; plus one, so that untouched memory means "none".
        self._first: IntArray = np.zeros(self._num_blocks, np.int32)
        self._next: IntArray = np.zeros(capacity, np.int32)
        self._places: Places = np.zeros((self._bands.number, buckets, WAYS, 2), np.uint32)
        self._state: IntArray = np.zeros(3, np.int32)

    def __len__(self) -> int:
        """Windows that are kept."""
        return int(self._state[IN_USE])

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved; pages are touched when they are used."""
        arrays = (self.block, self.length, self._salts, self._text, self._context)
        return sum(it.nbytes for it in (*arrays, self._first, self._next, self._places))

    def insert(self, salt: int, marks: Marks, blocks: IntArray, lengths: IntArray) -> None:
        """Keep windows.

        Args:
            salt: of their namespace.
            blocks, lengths: int32 `[n]`; see the attributes.
        """
        _insert(
            self.block,
            self.length,
            self._salts,
            self._text,
            self._context,
            self._first,
            self._next,
            self._places,
            self._state,
            np.uint64(salt),
            marks.text,
            marks.context,
            blocks,
            lengths,
            self._bands.rows,
        )

    def remove(self, block: int) -> None:
        """A block was evicted: forget what ends in it."""
        if self._first[block]:
            _remove(self.block, self._first, self._next, self._state, block)

    def look_up(self, salt: int, marks: Marks, threshold: float) -> IntArray:
        """Windows of a namespace that are similar to some text.

        Args:
            salt: of the namespace.
            threshold: least estimated Jaccard similarity.

        Returns:
            int32 `[candidates, 4]`: row of `marks`, window, and how many places of the signature
            and of that of the context are equal; at most `MOST` of each row, by row.
        """
        if not len(self):
            return np.empty((0, 4), np.int32)
        permutations, _ = self._widths
        least = int(np.ceil(permutations * (_CHANCE + threshold * (1 - _CHANCE))))
        return _look_up(
            self.block,
            self._salts,
            self._text,
            self._context,
            self._places,
            np.uint64(salt),
            marks.text,
            marks.context,
            self._bands.rows,
            least,
        )


@kernel
def _band_key(signature: Hashes, first: int, rows: int, salt: np.uint64) -> np.uint64:
    key = salt
    for i in range(first, first + rows):
        key = (key ^ np.uint64(signature[i])) * _MIX_1
        key ^= key >> _SHIFT
    key *= _MIX_2
    return key ^ (key >> _HALF)


@kernel
def _folded(value: np.uint32) -> np.uint8:
    """Eight bits of a place. Minima are small numbers: their upper bits say little."""
    return np.uint8(np.uint32(value * np.uint32(0x9E3779B1)) >> np.uint32(24))


@kernel
def _insert(
    window_block: IntArray,
    window_length: IntArray,
    salts: npt.NDArray[np.uint64],
    kept_text: Bytes,
    kept_context: Bytes,
    first: IntArray,
    following: IntArray,
    places: Places,
    state: IntArray,
    salt: np.uint64,
    text: Hashes,
    context: Hashes,
    blocks: IntArray,
    lengths: IntArray,
    rows: int,
) -> None:
    bands, buckets, ways = places.shape[0], places.shape[1], places.shape[2]
    for i in range(blocks.size):
        if state[FREE] == 0:
            oldest = state[OLDEST]
            state[OLDEST] = (oldest + 1) % window_block.size
            if window_block[oldest] >= 0:
                _unlink(window_block, first, following, state, oldest)
            following[oldest], state[FREE] = 0, oldest + 1
        window = state[FREE] - 1
        state[FREE] = following[window]
        window_block[window], window_length[window] = blocks[i], lengths[i]
        following[window] = first[blocks[i]]
        first[blocks[i]] = window + 1
        state[IN_USE] += 1
        salts[window] = salt
        for place in range(text.shape[1]):
            kept_text[window, place] = _folded(text[i, place])
        for place in range(context.shape[1]):
            kept_context[window, place] = _folded(context[i, place])
        for band in range(bands):
            key = _band_key(text[i], band * rows, rows, salt)
            bucket = places[band, key & np.uint64(buckets - 1)]
            for way in range(ways - 1, 0, -1):  # the newest comes first
                bucket[way, 0], bucket[way, 1] = bucket[way - 1, 0], bucket[way - 1, 1]
            bucket[0, 0], bucket[0, 1] = np.uint32(key >> _HALF), window + 1


@kernel
def _unlink(
    window_block: IntArray, first: IntArray, following: IntArray, state: IntArray, window: int
) -> None:
    """Take one window from its block."""
    block = window_block[window]
    before = first[block]
    if before == window + 1:
        first[block] = following[window]
    else:
        while following[before - 1] != window + 1:
            before = following[before - 1]
        following[before - 1] = following[window]
    window_block[window] = -1
    state[IN_USE] -= 1


@kernel
def _remove(
    window_block: IntArray, first: IntArray, following: IntArray, state: IntArray, block: int
) -> None:
    while first[block] > 0:
        window = first[block] - 1
        _unlink(window_block, first, following, state, window)
        following[window], state[FREE] = state[FREE], window + 1


@kernel
def _look_up(
    window_block: IntArray,
    salts: npt.NDArray[np.uint64],
    kept_text: Bytes,
    kept_context: Bytes,
    places: Places,
    salt: np.uint64,
    text: Hashes,
    context: Hashes,
    rows: int,
    least: int,
) -> IntArray:
    bands, buckets, ways = places.shape[0], places.shape[1], places.shape[2]
    found = np.empty((text.shape[0] * MOST, 4), np.int32)
    met = np.empty(bands * ways, np.int32)
    folded = np.empty(text.shape[1], np.uint8)
    total = 0
    for row in range(text.shape[0]):
        count = 0
        for band in range(bands):
            key = _band_key(text[row], band * rows, rows, salt)
            bucket, tag = places[band, key & np.uint64(buckets - 1)], np.uint32(key >> _HALF)
            for way in range(ways):
                if bucket[way, 0] == tag and bucket[way, 1] > 0:
                    met[count] = np.int32(bucket[way, 1] - np.uint32(1))
                    count += 1
        if count == 0:
            continue
        for place in range(folded.size):
            folded[place] = _folded(text[row, place])
        begin = total
        for i in range(count):
            window = met[i]
            if window_block[window] < 0 or salts[window] != salt or _is_in(met, i, window):
                continue
            equal = 0
            for place in range(folded.size):
                equal += kept_text[window, place] == folded[place]
            if equal < least:
                continue
            same = 0
            for place in range(context.shape[1]):
                same += kept_context[window, place] == _folded(context[row, place])
            at = total
            if total == begin + MOST:  # the worst one makes room, if it is worse
                at = begin
                for other in range(begin, total):
                    if found[other, 2] < found[at, 2]:
                        at = other
                if found[at, 2] >= equal:
                    continue
            else:
                total += 1
            found[at, 0], found[at, 1], found[at, 2], found[at, 3] = row, window, equal, same
    return found[:total].copy()


@kernel
def _is_in(met: IntArray, count: int, window: int) -> bool:
    found = False
    for i in range(count):
        found |= met[i] == window
    return found
