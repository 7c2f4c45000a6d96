# SPDX-License-Identifier: Apache-2.0
"""What a request of vLLM says of itself: its tokens, its namespace, and why it is not reused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.cache.namespace import namespace_key
from vllm_segreuse.plan import IntArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

Adapter = tuple[str, str] | None
"""Name and path of a LoRA adapter; None: the model itself."""

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
    return namespace_with(request, extra_keys, adapter_of(request), images)


def adapter_of(request: Request) -> Adapter:
    """The request's LoRA adapter."""
    lora = request.lora_request
    return (lora.lora_name, lora.lora_path) if lora else None


def namespace_with(
    request: Request, extra_keys: tuple[str, ...], adapter: Adapter, images: PromptImages | None
) -> bytes:
    """The same, if the request had this adapter."""
    others = request.mm_features if images is None else ()
    identifiers = tuple(feature.identifier for feature in others)
    return namespace_key(extra_keys, request.cache_salt, adapter, identifiers)


def lora_id_of(request: Request) -> int:
    """vLLM's number of the request's LoRA adapter; 0: none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def has_adapter(request: Any) -> bool:
    """Whether the folder of a request's LoRA adapter is there, if it has one; a name that a hub may
    know counts as there. Once the request has ended, it may be gone: whoever sends another one with
    it then ends the engine."""
    path = os.path.expanduser(request.lora_request.lora_path) if request.lora_request else ""
    return not os.path.isabs(path) or os.path.exists(path)


def all_tokens(request: Request) -> IntArray:
    """int32, the prompt and what was generated so far."""
    return np.array(request.all_token_ids[:], dtype=np.int32)
