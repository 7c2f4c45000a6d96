# SPDX-License-Identifier: Apache-2.0
"""What a request of vLLM says of itself: its tokens, its namespace, and why it is not reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.cache.images import ImageIds, ImageKey, PromptImages
from vllm_segreuse.cache.namespace import namespace_key
from vllm_segreuse.plan import Image, IntArray

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

Adapter = tuple[str, str] | None
"""Name and path of a LoRA adapter; None: the model itself."""

MAX_ADAPTERS = 64
"""So many adapters are looked at to explain a prompt."""

NEVER_DONATES = ("multimodal", "prompt_embeds", "streaming_input")
"""Reasons for which the blocks of a request are not indexed: its tokens do not say all of them."""


def bypass_reason(request: Request, images: PromptImages | None) -> str | None:
    """Why a request of this kind never reuses, or None. Of several reasons it is the one for which
    the request does not donate either.

    Args:
        images: of the request; None: it has none, or they cannot be told apart.
    """
    params = request.sampling_params
    reasons = {
        "multimodal": bool(request.mm_features) and images is None,
        "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
        "streaming_input": request.resumable,
        "pooling": params is None,
        "prompt_logprobs": params is not None and params.prompt_logprobs is not None,
        "prefix_cache_skipped": request.skip_reading_prefix_cache,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def namespace_of(
    request: Request, extra_keys: tuple[str, ...], images: PromptImages | None = None
) -> bytes:
    """Everything that separates the request's KV from that of others.

    Args:
        images: of the request, whose tokens say which they are; None: what else it has beside text
            is part of the namespace.
    """
    return _namespace(request, extra_keys, adapter_of(request), images)


def adapter_of(request: Request) -> Adapter:
    """The request's LoRA adapter."""
    lora = request.lora_request
    return (lora.lora_name, lora.lora_path) if lora else None


def _namespace(
    request: Request, extra_keys: tuple[str, ...], adapter: Adapter, images: PromptImages | None
) -> bytes:
    others = request.mm_features if images is None else ()
    identifiers = tuple(feature.identifier for feature in others)
    return namespace_key(extra_keys, request.cache_salt, adapter, identifiers)


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


class RecentAdapters:
    """The adapters that requests have named lately, for `explain`; one per engine."""

    def __init__(self) -> None:
        self._seen: dict[Adapter, None] = {}  # the latest last

    def note(self, request: Request) -> None:
        """A request arrived."""
        adapter = adapter_of(request)
        self._seen.pop(adapter, None)
        self._seen[adapter] = None
        if len(self._seen) > MAX_ADAPTERS:
            del self._seen[next(iter(self._seen))]

    def others(
        self, request: Request, extra_keys: tuple[str, ...], images: PromptImages | None = None
    ) -> list[bytes]:
        """Namespaces that differ from the request's own by the adapter only."""
        own = adapter_of(request)
        others = (adapter for adapter in self._seen if adapter != own)
        return [_namespace(request, extra_keys, adapter, images) for adapter in others]


def lora_id_of(request: Request) -> int:
    """vLLM's number of the request's LoRA adapter; 0: none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def all_tokens(request: Request) -> IntArray:
    """int32, the prompt and what was generated so far."""
    return np.array(request.all_token_ids[:], dtype=np.int32)
