# SPDX-License-Identifier: Apache-2.0
"""The features of the scheduler's process, in the order in which a request passes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_segreuse.cache.forgotten import Forgotten
from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.documents.layout import Layout
from vllm_segreuse.features.audit.scheduler import Auditing
from vllm_segreuse.features.conversations.scheduler import Continued
from vllm_segreuse.features.explain.scheduler import Explaining
from vllm_segreuse.features.frozen.scheduler import FrozenDocuments, frozen_pool
from vllm_segreuse.features.images.scheduler import ImageReuse
from vllm_segreuse.features.similar.scheduler import SimilarSegments
from vllm_segreuse.features.tier.scheduler import Tiering
from vllm_segreuse.features.tracing.scheduler import Tracing
from vllm_segreuse.features.trained.scheduler import BlockAttention, CompressedDocuments
from vllm_segreuse.methods import Methods
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Feature
from vllm_segreuse.tracing import is_traced

if TYPE_CHECKING:
    from vllm_segreuse.tier.store import TierStore


class SchedulerFeatures(NamedTuple):
    """Of an engine.

    Attributes:
        ordered: all of them. A request passes them in this order.
        frozen, audit, trained, compressed, images, conversations, tier, explain: each by itself.
    """

    ordered: tuple[Feature, ...]
    frozen: FrozenDocuments
    audit: Auditing
    trained: BlockAttention | None
    compressed: CompressedDocuments
    images: ImageReuse
    conversations: Continued
    tier: Tiering | None
    explain: Explaining

    def listeners(self, donors: BlockListener) -> list[BlockListener]:
        """Who is told what becomes of blocks, in this order.

        Documents that are held for waiting requests may be frozen, too: before a reset they are
        released first, or the frozen pool would not be the only one to hold its blocks.
        """
        first = () if self.trained is None else self.trained.listeners
        others = (it for it in self.ordered if it is not self.trained)
        return [*first, donors, *(listener for it in others for listener in it.listeners)]

    def having(self, hook: str) -> tuple[Feature, ...]:
        """The features that have a hook of this name, in order."""
        default = getattr(Feature, hook)
        return tuple(it for it in self.ordered if getattr(type(it), hook) is not default)


def scheduler_features(
    core: Core,
    methods: Methods,
    forgotten: Forgotten,
    store: TierStore | None,
    layout: Layout | None,
) -> SchedulerFeatures:
    """The features of an engine.

    Args:
        core: of the engine.
        methods: policies of requests.
        forgotten: what donates no more.
        store: the second tier, if there is one.
        layout: of prompts, where the model was trained on documents computed alone.
    """
    tier = None if store is None else Tiering(core, store)
    entries = frozen_pool(core)
    compressed = CompressedDocuments(core, entries, methods)
    kept = None if store is None else store.documents
    frozen = FrozenDocuments(core, entries, kept, compressed.compression.part)
    trained = None if layout is None else BlockAttention(core, layout, entries)
    audit, images, explain = Auditing(core), ImageReuse(core), Explaining(core, forgotten)
    conversations = Continued(core, methods)
    # Whose documents are found by their tokens keeps images apart by namespace.
    ordered = (
        frozen,
        audit,
        trained,
        compressed,
        images if trained is None else None,
        SimilarSegments(core, methods),
        conversations,
        tier,
        explain,
        Tracing() if is_traced(core.vllm_config) else None,
    )
    return SchedulerFeatures(
        tuple(it for it in ordered if it is not None),
        frozen,
        audit,
        trained,
        compressed,
        images,
        conversations,
        tier,
        explain,
    )
