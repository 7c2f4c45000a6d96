# SPDX-License-Identifier: Apache-2.0
"""Documents of knowledge bases: computed once, and frozen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_segreuse.features.knowledge.freezing import Freezing, MakePart
from vllm_segreuse.features.knowledge.frozen import FrozenPool
from vllm_segreuse.features.knowledge.kept import KeepingTier
from vllm_segreuse.features.knowledge.options import KnowledgeOptions
from vllm_segreuse.plan import FreezeOrder, ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import TrackedRequest

Compressed = Callable[[TrackedRequest], MakePart | None]
"""For a request that makes a part of a compressed document: what makes the part of its blocks."""


class FrozenDocuments(Feature):
    """Of one engine.

    Args:
        core: of the engine.
        entries: what is frozen.
        tier: keeps documents beyond GPU memory; None where there is none.

    Attributes:
        freezing: puts blocks among the entries.
        compressed: of another feature, that makes parts; see `Compressed`.
    """

    name = "frozen"

    def __init__(
        self,
        core: Core,
        entries: FrozenPool,
        tier: KeepingTier | None,
    ) -> None:
        self.entries = entries
        self.freezing = Freezing(entries, core.index, core.pool.is_exact, core.health, tier)
        self.listeners = (self.freezing,)
        self.compressed: Compressed = lambda tracked: None
        self._orders: dict[str, FreezeOrder] = {}
        self._stats = core.stats
        self._noted = 0
        self.calls = {"frozen": self.freezing.state, "unfreeze": self.freezing.forget}

    def admit(self, arriving: Arriving) -> None:
        """What is shared between users must hold nothing of anybody's prompt, and its own context
        donates to nobody."""
        if arriving.parsed.freeze is not None:
            order = FreezeOrder.parse(arriving.parsed.freeze)
            self._orders[arriving.request.request_id] = order
            arriving.bypass("knowledge_base", restores=True)
            if arriving.tracked.donates:
                arriving.tracked.donates_from = order.first_token

    def searched(self, arriving: Arriving) -> None:
        """Entries that the prompt contains, or the request names, may return."""
        tracked, parsed = arriving.tracked, arriving.parsed
        if parsed.documents and not parsed.compresses:
            self.freezing.asked_for(tracked.prompt, parsed.documents)
        if tracked.bypass is None:
            self.freezing.notice(tracked.prompt)

    def allocated(self, admitted: Admitted) -> None:
        """Parts of an entry are computed one behind the other, which is no use of it."""
        tracked = admitted.tracked
        if admitted.is_first and tracked.request_id not in self._orders:
            donors = [] if tracked.plan is None else tracked.plan.donor_blocks
            self.entries.used([*admitted.hit_blocks, *donors])

    def finished(self, ending: Ending) -> None:
        """Carry out the order of the request, if it has one."""
        order, tracked = self._orders.pop(ending.request.request_id, None), ending.tracked
        if order is None or tracked is None:
            return
        is_frozen = False
        if ending.is_complete:
            make = self.compressed(tracked)
            is_frozen = self.freezing.finish(tracked.prompt, order, ending.block_ids, make)
        else:
            status = ending.request.status.name.lower().replace("_", " ")
            self.freezing.refuse(order.entry, f"its request is {status}: warm it again")
        ending.add(frozen=is_frozen)
        if not is_frozen:
            ending.add(not_frozen=self.freezing.why_refused(order.entry))

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> None:
        """Evict entries while too many blocks are in use."""
        self.freezing.begin_step()
        if self.entries.num_frozen != self._noted:
            self._noted = self.entries.num_frozen
            self._stats.set("frozen_share", self._noted / self.entries.num_blocks)


def frozen_pool(core: Core) -> FrozenPool:
    """An empty one."""
    options = KnowledgeOptions.of(core.config)
    return FrozenPool(
        core.pool,
        core.namespaces,
        core.num_blocks,
        _frozen_limit(core),
        options.frozen_pressure,
        options.frozen_returns,
        clock=time.time,
    )


def _frozen_limit(core: Core) -> int:
    """Most blocks that may be frozen: the configured share, and never so many that a request of
    maximum length would not fit beside them. None where other layers have blocks of their own,
    which would be held, too, and are not counted."""
    longest = -(-core.slots.max_tokens // core.block_size)
    others = longest + core.manager.watermark_blocks + 1  # one for the token to come
    num_blocks = core.num_blocks
    if not core.group.is_alone:
        return 0
    return max(
        0, min(int(KnowledgeOptions.of(core.config).frozen_share * num_blocks), num_blocks - others)
    )


def start(making: Making) -> FrozenDocuments:
    """That of an engine."""
    stored = None if making.store is None else making.store.documents
    return FrozenDocuments(making.core, frozen_pool(making.core), stored)
