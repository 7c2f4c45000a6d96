# SPDX-License-Identifier: Apache-2.0
"""What is found for a prompt with images: these wholly, or not at all.

prompt     text [image A] text [image B] text      A is known, B is new
found      ****  *******   **       **    ****
plan       ****  *******   **                      ends one token in front of B

The pass computes no token of an image, since it has no embeddings: an image is reused as it is, or
vLLM computes it, and whatever stands behind it.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray


class ImageFinder(Finder):
    """Of one prompt with images.

    Args:
        finder: searches for it.
        images: of the prompt.
    """

    def __init__(self, finder: Finder, images: PromptImages) -> None:
        self._finder = finder
        self._images = images

    @property
    def is_exact(self) -> bool:
        """As of the finder."""
        return self._finder.is_exact

    def prepare(self, prompt: Prompt) -> None:
        self._finder.prepare(prompt)

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        found = self._finder.remembered(prompt, start, stop)
        return None if found is None else self._with_whole_images(found, start, stop)

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self._with_whole_images(self._finder.find(prompt, start, stop), start, stop)

    def plan_stop(self, matches: Matches, start: int, stop: int) -> int:
        stop = max(start, self._finder.plan_stop(matches, start, stop))
        return self._limit(matches, start, stop)

    def part(
        self, prompt: Prompt, matches: Matches, kept: BoolArray, start: int, stop: int
    ) -> Matches | None:
        found = self._finder.part(prompt, matches, kept, start, stop)
        return None if found is None else self._with_whole_images(found, start, stop)

    def _limit(self, matches: Matches, start: int, stop: int) -> int:
        return self._images.limit(matches.pieces.reused(start, stop), start, stop)

    def _with_whole_images(self, matches: Matches, start: int, stop: int) -> Matches:
        limit = self._limit(matches, start, stop)
        pieces = matches.pieces.up_to(limit)
        segments = len(pieces.segments(0).first)
        return Matches(pieces, int(np.sum(pieces.length)), segments, matches.max_depth)
