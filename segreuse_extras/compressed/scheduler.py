# SPDX-License-Identifier: Apache-2.0
"""Compressed documents: requests that make them, and that name them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from segreuse_extras.compressed.compression import Compression
from vllm_segreuse.features.knowledge.frozen import FrozenPool
from vllm_segreuse.features.knowledge.scheduler import FrozenDocuments
from vllm_segreuse.plan import PlanOutcome
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CompressedDocuments(Feature):
    """Requests that make compressed documents, and that name them.

    Args:
        core: of the engine.
        entries: what is frozen.
    """

    name = "compressed"

    def __init__(self, core: Core, entries: FrozenPool) -> None:
        self.compression = Compression(core.pool, entries, core.block_size)

    def identify(self, arriving: Arriving) -> None:
        """The pass cannot compute documents by their names: they are wholly reused."""
        if arriving.parsed.documents or arriving.parsed.compresses:
            arriving.is_text = False

    def admit(self, arriving: Arriving) -> None:
        """An order is carried out whatever else the request says; names wrap its finder."""
        tracked, parsed = arriving.tracked, arriving.parsed
        if parsed.compresses:
            self.compression.order(tracked, arriving.request, parsed)
        elif parsed.documents and not arriving.has_documents:
            # A named document is more than less work: its tokens as a text have other KV.
            make_recipe = functools.partial(arriving.methods.recipe, arriving.options, None)
            tracked.method = replace(tracked.method, make_recipe=make_recipe)
            self.compression.name(tracked, parsed.documents)

    def outcome(
        self, request: Request, tracked: TrackedRequest | None, outcome: PlanOutcome
    ) -> bool:
        """A score says nothing about anybody's requests."""
        plan = None if tracked is None else tracked.plan
        return self.compression.carried_out(request.request_id, outcome, plan)

    def finished(self, ending: Ending) -> None:
        """Report what a score has chosen."""
        chosen = self.compression.ended(ending.request.request_id)
        if chosen is not None:
            ending.add(chosen=chosen)


def start(making: Making) -> CompressedDocuments:
    """That of an engine; what it makes is frozen."""
    frozen = making.earlier(FrozenDocuments)
    feature = CompressedDocuments(making.core, frozen.entries)
    frozen.compressed = feature.compression.part
    return feature
