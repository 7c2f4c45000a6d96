# SPDX-License-Identifier: Apache-2.0
"""Text that was computed for another LoRA adapter: which adapters there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.scheduling.arrival import Adapter, adapter_of, namespace_with

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ADAPTERS = 64
"""So many adapters are looked at to explain a prompt."""


class RecentAdapters:
    """The adapters that requests have named lately; one per engine."""

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
        return [namespace_with(request, extra_keys, adapter, images) for adapter in others]
