# SPDX-License-Identifier: Apache-2.0
"""The parts of a scheduler's half, as tests look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # or every process that tests start would load numba
    from segreuse_extras.conversations.conversations import Conversations
    from vllm_segreuse.cache.index import SegmentIndex
    from vllm_segreuse.cache.namespace import NamespaceTable
    from vllm_segreuse.features.knowledge.freezing import Freezing
    from vllm_segreuse.scheduling.core import Core
    from vllm_segreuse.scheduling.donors import Donors
    from vllm_segreuse.scheduling.health import Health
    from vllm_segreuse.scheduling.methods import Methods
    from vllm_segreuse.scheduling.planner import Planner


class Parts:
    """Of one engine."""

    def __init__(self, side: Any) -> None:
        features = side.parts.features
        self.core: Core = side.parts.core
        self.index: SegmentIndex = side.parts.core.index
        self.health: Health = side.parts.core.health
        self.namespaces: NamespaceTable = side.parts.core.namespaces
        self.planner: Planner = side.parts.planner
        self.donors: Donors = side.parts.donors
        self.methods: Methods = side.parts.methods
        of = {feature.name: feature for feature in features}
        self.feature: dict[str, Any] = of
        self.freezing: Freezing = of["frozen"].freezing
        self.entries = self.freezing.entries
        self.conversations: Conversations = of["conversations"].conversations
        self.audits: Any = of["audit"].audits
        self.compression: Any = of["compressed"].compression
        self.tier: Any = of["tier"].store if "tier" in of else None
        self.isolated: Any = of["trained"].requests if "trained" in of else None


def parts_of(side: Any) -> Parts:
    """What a scheduler's half is made of."""
    return Parts(side)
