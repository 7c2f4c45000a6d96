# SPDX-License-Identifier: Apache-2.0
"""Pieces that copy tokens of one sequence whose blocks are known, and where pieces may go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_segreuse.plan import IntArray, Pieces


def rows(blocks: IntArray, positions: IntArray, destination: int, block_size: int) -> IntArray:
    """Pieces that copy tokens of a sequence behind each other, int32 `[n, 5]`.

    Args:
        blocks: of that sequence.
        positions: of the tokens there, ascending, at least one.
        destination: of the first of them.
    """
    block = positions // block_size
    begins = np.ones(len(positions), np.bool_)
    begins[1:] = (np.diff(positions) != 1) | (np.diff(block) != 0)
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, len(positions)))
    position = positions[first]
    columns = (
        *(destination + first, length, blocks[position // block_size]),
        *(position % block_size, position),
    )
    return np.stack(columns, axis=1).astype(np.int32)


def within(table: IntArray, start: int, stop: int) -> IntArray:
    """What of pieces, int32 `[n, 5]`, goes to `[start, stop)`."""
    destination, length = table[:, 0], table[:, 1]
    before = np.clip(start - destination, 0, length)
    behind = np.clip(destination + length - stop, 0, length - before)
    cut = table + np.stack((before, -before - behind, 0 * before, before, before), axis=1)
    return np.asarray(cut[cut[:, 1] > 0], np.int32)


def outside(pieces: Pieces, spans: Sequence[tuple[int, int]]) -> Pieces:
    """The pieces that go to none of these spans; one that does in part is left out as a whole."""
    free = np.ones(len(pieces), np.bool_)
    for start, stop in spans:
        free &= (pieces.destination + pieces.length <= start) | (pieces.destination >= stop)
    return pieces.where(free)
