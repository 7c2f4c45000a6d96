# SPDX-License-Identifier: Apache-2.0
"""The images of a prompt, each token of which has an id of its own.

    prompt     5 9 P P P P 7                       P: the placeholder
    here       5 9 -2^31 -2^31+1 -2^31+2 ... 7     below 0, where no vocabulary has ids

Equal ids mean the same token of the same image, as long as any block of the index, or any request,
has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_segreuse.plan import Image, Images, IntArray


class PromptImages(Images):
    """The images of a prompt, with the ids of their tokens.

    Args:
        images: in order.
        first_ids: of each.
    """

    def __init__(self, images: Sequence[Image], first_ids: Sequence[int]) -> None:
        super().__init__(images)
        self._first_ids = first_ids

    def keyed(self, tokens: IntArray, first: int = 0) -> IntArray:
        """The tokens with the ids of images instead of placeholders.

        Args:
            tokens: int32 `[n]`.
            first: index of the first of them in the prompt.
        """
        keyed = tokens.copy()
        stop = first + len(tokens)
        for image, first_id in zip(self.images, self._first_ids, strict=True):
            low, high = max(image.start, first), min(image.stop, stop)
            if low < high:
                keyed[low - first : high - first] = np.arange(
                    first_id + low - image.start, first_id + high - image.start
                )
        return keyed
