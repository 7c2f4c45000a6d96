# SPDX-License-Identifier: Apache-2.0
"""What a request of vLLM says of itself: its tokens, its namespace, and why it is not reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.cache.namespace import namespace_key
from vllm_segreuse.plan import IntArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

Adapter = tuple[str, str] | None
"""Name and path of a LoRA adapter; None: the model itself."""

MAX_ADAPTERS = 64
"""So many adapters are looked at to explain a prompt."""

NEVER_DONATES = ("multimodal", "prompt_embeds", "streaming_input")
"""Reasons for which the blocks of a request are not indexed: its tokens do not say all of them."""


def bypass_reason(request: Request) -> str | None:
    """Why a request of this kind never reuses, or None."""
    params = request.sampling_params
    reasons = {
        "pooling": params is None,
        "prompt_logprobs": params is not None and params.prompt_logprobs is not None,
        "prefix_cache_skipped": request.skip_reading_prefix_cache,
        "multimodal": bool(request.mm_features),
        "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
        "streaming_input": request.resumable,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def namespace_of(request: Request, extra_keys: tuple[str, ...]) -> bytes:
    """Everything that separates the request's KV from that of others."""
    return _namespace(request, extra_keys, adapter_of(request))


def adapter_of(request: Request) -> Adapter:
    """The request's LoRA adapter."""
    lora = request.lora_request
    return (lora.lora_name, lora.lora_path) if lora else None


def _namespace(request: Request, extra_keys: tuple[str, ...], adapter: Adapter) -> bytes:
    images = tuple(feature.identifier for feature in request.mm_features)
    return namespace_key(extra_keys, request.cache_salt, adapter, images)


class Adapters:
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

    def others(self, request: Request, extra_keys: tuple[str, ...]) -> list[bytes]:
        """Namespaces that differ from the request's own by the adapter only."""
        own = adapter_of(request)
        others = (adapter for adapter in self._seen if adapter != own)
        return [_namespace(request, extra_keys, adapter) for adapter in others]


def lora_id_of(request: Request) -> int:
    """vLLM's number of the request's LoRA adapter; 0: none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def all_tokens(request: Request) -> IntArray:
    """int32, the prompt and what was generated so far."""
    return np.array(request.all_token_ids[:], dtype=np.int32)
