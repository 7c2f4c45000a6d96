# SPDX-License-Identifier: Apache-2.0
"""Pieces: runs of tokens that are copied from where they were computed before."""

from __future__ import annotations

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray


def segment_starts(pieces: IntArray, start: int) -> IntArray:
    """Where, counted from `start`, reused tokens begin that did not follow each other before.

    Args:
        pieces: see `ReusePlan`.
        start: first position of the plan.
    """
    destination, length, _, _, position = pieces.T
    follows = np.zeros(len(pieces), dtype=np.bool_)
    follows[1:] = (destination[:-1] + length[:-1] == destination[1:]) & (
        destination[:-1] - position[:-1] == destination[1:] - position[1:]
    )
    return np.asarray(destination[~follows] - start, dtype=np.int32)


def reused_mask(pieces: IntArray, start: int, stop: int) -> BoolArray:
    """bool `[stop - start]`: positions covered by the pieces."""
    mask = np.zeros(stop - start + 1, dtype=np.int8)
    np.add.at(mask, pieces[:, 0] - start, 1)
    np.add.at(mask, pieces[:, 0] + pieces[:, 1] - start, -1)
    return np.cumsum(mask[:-1], dtype=np.int8).astype(np.bool_)
