# SPDX-License-Identifier: Apache-2.0
"""Images in a prompt, and how M-RoPE mrope_positions the tokens in and around them.

tokens     a b c I I I I I I d e          I: an image of 2 rows and 3 columns
index      0 1 2 3 4 5 6 7 8 9 10
time       0 1 2 3 3 3 3 3 3 6 7
height     0 1 2 3 3 3 4 4 4 6 7
width      0 1 2 3 4 5 3 4 5 6 7
lag        0 0 0 0 0 0 0 0 0 3 3          index of the text's position, less its number

An image begins at the number behind the text in front of it, in all three rows, and the text behind
it goes on behind the largest number within it (`get_mrope_input_positions` of vLLM's
`model_executor/models/qwen2_5_vl.py` and `qwen3_vl.py`). So all numbers of an image, and of a run
of text, change by the same in all three rows when it is moved. The key of a token is turned by one
angle per channel, whatever row the channel belongs to: by the difference of `index - lag`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray

ROWS = 3
"""Time, height and width."""


class Image(NamedTuple):
    """One image.

    Attributes:
        start: index of its first token.
        height, width: tokens.
    """

    start: int
    height: int
    width: int

    @property
    def stop(self) -> int:
        """Index behind its last token."""
        return self.start + self.height * self.width

    @property
    def shortens(self) -> int:
        """By how much fewer mrope_positions than tokens it takes."""
        return self.height * self.width - max(self.height, self.width)


class Images:
    """The images of a prompt.

    Args:
        images: in order, not overlapping.

    Attributes:
        images: as given.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        self.images = tuple(images)
        self._stops = np.array([image.stop for image in self.images], np.int64)
        self._lags = np.cumsum([0, *(image.shortens for image in self.images)]).astype(np.int32)

    def position_offsets(self, start: int, stop: int) -> IntArray:
        """int32 `[stop - start]`: by how much the number of each token is behind its index; of an
        image's token, the number at which the image begins behind the index of its first token."""
        found: IntArray = self._lags[
            np.searchsorted(self._stops, np.arange(start, stop), side="right")
        ]
        return found

    def covers(self, start: int, stop: int) -> BoolArray:
        """bool `[stop - start]`: which tokens are those of images."""
        covered = np.zeros(stop - start, np.bool_)
        for image in self.images:
            covered[max(image.start - start, 0) : max(image.stop - start, 0)] = True
        return covered

    def mrope_positions(self, start: int, stop: int) -> IntArray:
        """int32 `[3, stop - start]`: time, height and width of each token."""
        first = np.arange(start, stop, dtype=np.int32) - self.position_offsets(start, stop)
        mrope_positions = np.repeat(first[None], ROWS, axis=0)
        for image in self.images:
            low, high = max(image.start, start), min(image.stop, stop)
            if low < high:
                within = np.arange(low, high, dtype=np.int32) - image.start
                row, column = np.divmod(within, image.width)
                mrope_positions[:, low - start : high - start] -= within
                mrope_positions[1, low - start : high - start] += row
                mrope_positions[2, low - start : high - start] += column
        return mrope_positions

    def limit(self, reused: BoolArray, start: int, stop: int) -> int:
        """Where a plan ends: one token in front of the first image that is not wholly reused.

        Its last probe stands there, and must be text. vLLM computes what follows, and has the
        encoder compute the image.

        Args:
            reused: bool `[stop - start]`.
            start: of the plan.
            stop: where it would end without images, the end of `reused`.
        """
        new = self.first_new(reused, start)
        if new is not None:
            stop = min(stop, new - 1)
        for image in reversed(self.images):
            if image.start <= stop < image.stop:
                stop = image.start - 1
        return max(start, stop)

    def first_new(self, reused: BoolArray, start: int) -> int | None:
        """Index at which the first image begins that is not wholly reused; None: all are.

        Args:
            reused: bool `[n]`, of the tokens from `start` on.
            start: what is in front of it is there already.
        """
        for image in self.images:
            if image.stop <= start:
                continue
            behind = image.stop - start
            if behind > len(reused) or not reused[max(image.start - start, 0) : behind].all():
                return image.start
        return None
