# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: their tokens are told apart, and reused as whole images."""

from __future__ import annotations

import numpy as np

from segreuse_extras.images.finder import ImageFinder
from segreuse_extras.images.ids import ImageIds, images_of
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.model.documents import sees_documents_alone
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import IntArray
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Arriving, Feature
from vllm_segreuse.scheduling.making import Making


class ImageReuse(Feature):
    """Of one engine.

    Attributes:
        merge_size: what the workers have proven of images: patches per token in a row, and in a
            column; None: they are not reused.
    """

    name = "images"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ids = ImageIds(self._in_use)
        self.merge_size: int | None = None

    def learned(self, fact: int | None) -> None:
        """The workers have proven images of this merge size."""
        self.merge_size = fact

    def finder(self, options: PolicyOptions, images: PromptImages | None, inner: Finder) -> Finder:
        """Images are found as a whole."""
        return inner if images is None else ImageFinder(inner, images)

    def identify(self, arriving: Arriving) -> None:
        """Tell the images of a prompt apart. They are wholly reused: the pass cannot compute them,
        and a plan with images begins where the prefix hit ends."""
        if not arriving.is_text or arriving.extra_keys is None:
            return
        arriving.images = images_of(arriving.request, self.merge_size, self._ids)
        if arriving.images is not None:
            arriving.is_text = arriving.may_restore = False

    def _in_use(self) -> IntArray:
        """Ids of the tokens of images that somebody has, int32 `[n]`."""
        prompts = [request.prompt for request in self._core.requests.values()]
        live = [it.tokens[it.tokens < 0] for it in prompts if it.images is not None]
        return np.concatenate([self._core.index.image_tokens(), *live])


def start(making: Making) -> ImageReuse | None:
    """That of an engine; None: documents are found by their tokens, and keep images apart by
    namespace; or other layers have blocks of their own: images are not proven there."""
    alone = sees_documents_alone(making.core.vllm_config.model_config)
    if alone or not making.core.group.is_alone:
        return None
    return ImageReuse(making.core)
