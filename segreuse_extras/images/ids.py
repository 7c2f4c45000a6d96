# SPDX-License-Identifier: Apache-2.0
"""Token ids for images. In a prompt all tokens of all images are the same placeholder, so that the
index could not tell one image from another: each token of each image is given an id of its own.

    prompt     5 9 P P P P 7                       P: the placeholder
    here       5 9 -2^31 -2^31+1 -2^31+2 ... 7     below 0, where no vocabulary has ids

Equal ids mean the same image, by vLLM's identifier and by its rows and columns, and the same token
of it. An id means one token as long as any block of the index, or any request, has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.plan import Image, IntArray

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

MOST_IMAGES = 1 << 16
"""Images whose ids are remembered; the one that was asked for longest ago is forgotten first, and
has other ids when it returns."""

_FIRST, _IDS = -(1 << 31), 1 << 31


class ImageKey(NamedTuple):
    """What makes two images the same.

    Attributes:
        identifier: vLLM's: a hash of the image and of how it is processed, or what the client calls
            it.
        height, width: tokens.
    """

    identifier: str
    height: int
    width: int


class ImageIds:
    """Gives ids to images; one per engine.

    Args:
        in_use: ids below 0 that blocks of the index or live requests have, in any order.
        ids: how many there are.
        most: images that are remembered.
    """

    def __init__(
        self, in_use: Callable[[], IntArray], ids: int = _IDS, most: int = MOST_IMAGES
    ) -> None:
        self._in_use = in_use
        self._most = most
        self._known: OrderedDict[ImageKey, int] = OrderedDict()
        self._next, self._stop = _FIRST, _FIRST + ids
        self._all = _FIRST, _FIRST + ids

    def firsts(self, keys: Sequence[ImageKey]) -> list[int] | None:
        """The id of the first token of each image of a prompt; the others follow. None: too few ids
        are left for them.

        All at once: nobody has those that were given to a part of them yet.
        """
        if self._missing(keys) > self._stop - self._next:
            self._recycle()
            if self._missing(keys) > self._stop - self._next:
                return None
        found = [self._first(key) for key in keys]
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return found

    def _missing(self, keys: Sequence[ImageKey]) -> int:
        """Ids that have to be given."""
        return sum(key.height * key.width for key in set(keys) - self._known.keys())

    def _first(self, key: ImageKey) -> int:
        if key not in self._known:
            self._known[key] = self._next
            self._next += key.height * key.width
        self._known.move_to_end(key)
        return self._known[key]

    def _recycle(self) -> None:
        """Go on in the longest run of ids that nobody has; images that had some of them are not
        known any more."""
        low, high = self._all
        used = np.unique(self._in_use().astype(np.int64))
        bounds = np.concatenate([[low - 1], used, [high]])
        longest = int(np.diff(bounds).argmax())
        self._next, self._stop = int(bounds[longest]) + 1, int(bounds[longest + 1])
        for key, first in list(self._known.items()):
            if first < self._stop and first + key.height * key.width > self._next:
                del self._known[key]


def images_of(request: Request, merge_size: int | None, ids: ImageIds) -> PromptImages | None:
    """The images of a request; None: it has none, or has something that is not reused: video,
    audio, images whose size is not known here, or as many as there are no ids for.

    Args:
        merge_size: patches per token in a row, and in a column; None: the model's images are not
            reused.
        ids: of images.
    """
    if merge_size is None or not request.mm_features:
        return None
    images, keys = [], []
    for feature in sorted(request.mm_features, key=lambda feature: feature.mm_position.offset):
        size = _size_of(feature, merge_size)
        if size is None:
            return None
        images.append(Image(feature.mm_position.offset, *size))
        keys.append(ImageKey(feature.identifier, *size))
    first_ids = ids.firsts(keys)
    return None if first_ids is None else PromptImages(images, first_ids)


def _size_of(feature: MultiModalFeatureSpec, merge_size: int) -> tuple[int, int] | None:
    """Rows and columns of an image's tokens; None: it is none, or something else stands there."""
    place, grid = feature.mm_position, (feature.data or {}).get("image_grid_thw")
    if feature.modality != "image" or grid is None:
        return None
    time, height, width = (int(count) for count in grid.data)
    size = height // merge_size, width // merge_size
    is_whole = place.is_embed is None or bool(place.is_embed.all())
    if time != 1 or size[0] * size[1] != place.length or not place.length or not is_whole:
        return None
    return size
