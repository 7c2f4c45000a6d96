# SPDX-License-Identifier: Apache-2.0
"""The parts of a scheduler's half, as tests look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # or every process that tests start would load numba
    from vllm_segreuse.cache.conversations import Conversations
    from vllm_segreuse.cache.donors import Donors
    from vllm_segreuse.cache.freezing import Freezing
    from vllm_segreuse.cache.health import Health
    from vllm_segreuse.cache.index import SegmentIndex
    from vllm_segreuse.cache.namespace import NamespaceTable
    from vllm_segreuse.cache.planner import Planner
    from vllm_segreuse.methods import Methods


class Parts:
    """Of one engine."""

    def __init__(self, side: Any) -> None:
        features = side.parts.features
        self.index: SegmentIndex = side.parts.core.index
        self.health: Health = side.parts.core.health
        self.namespaces: NamespaceTable = side.parts.core.namespaces
        self.planner: Planner = side.parts.planner
        self.donors: Donors = side.parts.donors
        self.methods: Methods = side.parts.methods
        self.freezing: Freezing = features.frozen.freezing
        self.entries = self.freezing.entries
        self.conversations: Conversations = features.conversations.conversations
        self.audits: Any = features.audit.audits
        self.compression: Any = features.compressed.compression
        self.tier: Any = None if features.tier is None else features.tier.store
        self.isolated: Any = None if features.trained is None else features.trained.requests


def parts_of(side: Any) -> Parts:
    """What a scheduler's half is made of."""
    return Parts(side)
