# SPDX-License-Identifier: Apache-2.0
"""Models that were trained on documents computed alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from segreuse_extras.trained import requests as isolated
from segreuse_extras.trained.folder import layout_of
from segreuse_extras.trained.layout import Layout
from segreuse_extras.trained.refusals import POLICY
from vllm_segreuse.compat import kv_cache_manager
from vllm_segreuse.features.knowledge.frozen import FrozenPool
from vllm_segreuse.features.knowledge.scheduler import FrozenDocuments
from vllm_segreuse.plan import PlanOutcome, ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature, OwnRequests
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import Bypass, TrackedRequest, Use

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockAttention(Feature, OwnRequests):
    """Of an engine whose model was trained on documents computed alone.

    Args:
        core: of the engine.
        layout: of prompts.
        entries: compressed documents.
    """

    name = "trained"
    listens_first = True

    def __init__(self, core: Core, layout: Layout, entries: FrozenPool) -> None:
        self._core = core
        capacity = core.num_blocks - core.manager.watermark_blocks
        known = layout, core.pool, core.index, entries, core.slots, capacity
        self.requests = isolated.IsolatedRequests(*known)
        self.listeners = (self.requests.cold,)
        self._unreported: dict[str, deque[ReusePlan]] = {}  # plans that have left, oldest first

    def identify(self, arriving: Arriving) -> None:
        """Find the documents of a prompt. Without extra keys nobody else can name its namespace. A
        document of a knowledge base is laid out by itself."""
        if arriving.parsed.freeze is not None or not self.requests.arrived(arriving.request):
            arriving.lacks = Bypass("no_documents", restores=True)
            return
        arriving.has_documents, arriving.is_text, arriving.may_restore = True, False, False
        if arriving.extra_keys is None:
            arriving.extra_keys = isolated.private_keys()

    def admit(self, arriving: Arriving) -> None:
        """All that such a request reuses is exact, and it must not run without its documents."""
        request, tracked, keys = arriving.request, arriving.tracked, arriving.extra_keys
        assert keys is not None
        tracked.method = replace(tracked.method, min_reused_tokens=1)
        if isolated.is_private(keys):
            tracked.donates_nothing()
            arriving.may_restore = False
        if not arriving.has_documents:
            return
        # vLLM runs a request that is to read no cache, whatever `waits` says, and names its
        # blocks: others would find documents there that were computed in their place.
        request.skip_reading_prefix_cache = False
        if self.requests.compressed:
            self.requests.name(tracked, request, arriving.parsed.documents)
        else:
            namespace = tracked.prompt.namespace
            finder = self.requests.finder(request, keys, namespace, arriving.key)
            tracked.method = replace(tracked.method, finder=finder)
        tracked.method = replace(
            tracked.method, policy=POLICY, make_recipe=isolated.recipe, max_drift=math.inf
        )
        if not isinstance(tracked.mode, Bypass):
            tracked.mode = Use.REQUIRE

    def waits(self, request: Request, tracked: TrackedRequest | None, num_hit_tokens: int) -> bool:
        """For documents that are being computed; or to be ended, since it has none."""
        if not self.requests.needs_plan(request, num_hit_tokens):
            return False
        bypass = "error" if tracked is None else tracked.bypass
        return self.requests.waits(request, num_hit_tokens, bypass)

    def decided(
        self, request: Request, tracked: TrackedRequest, supplied: int | None
    ) -> int | None:
        """One that cannot be planned waits for room, or ends."""
        if supplied is None or tracked.plan is not None:
            return supplied
        if not self.requests.needs_plan(request, tracked.decision.start):
            return supplied
        cold, manager = self.requests.cold, self._core.manager
        reason = tracked.decision.reason
        anybody = kv_cache_manager.has_running_requests(manager) or cold.holds_for_others(
            request.request_id
        )
        if reason != "no_free_blocks" or not anybody:
            self.requests.fail(request, f"it cannot be planned ({reason})")
        return None

    def allocated(self, admitted: Admitted) -> None:
        """Nothing is held for it any more."""
        tracked = admitted.tracked
        # Also if an error has bypassed it since: the plan is carried out all the same.
        if tracked.plan is not None and self.requests.has_documents(tracked.request_id):
            waiting = self._unreported.setdefault(tracked.request_id, deque())
            waiting.append(tracked.plan)
        self.requests.cold.left(tracked.request_id)

    def outcome(
        self, request: Request, tracked: TrackedRequest | None, outcome: PlanOutcome
    ) -> bool:
        """End a request whose documents were computed behind each other."""
        plans = self._unreported.get(request.request_id)
        plan = plans.popleft() if plans else None
        is_wrong = plan is not None and plan.num_chosen(outcome.computed) > 0
        if not is_wrong or not self.requests.has_documents(request.request_id):
            return False
        self.requests.fail(request, "its plan failed, and was computed in full")
        return True

    def finished(self, ending: Ending) -> None:
        """A request with documents has ended, or one that has computed one."""
        self._unreported.pop(ending.request.request_id, None)
        self.requests.ended(ending.request, ending.block_ids if ending.is_complete else [])

    def to_add(self, running: int, waiting: int, is_paused: bool) -> Iterable[Request]:
        """Requests that compute documents for others."""
        return self.requests.cold.take()

    def to_fail(self) -> Iterable[str]:
        """Requests that are to be ended with an error."""
        return self.requests.take_failed()


def start(making: Making) -> BlockAttention | None:
    """That of an engine; None: its model was not trained so."""
    layout = layout_of(making.core.vllm_config.model_config)
    if layout is None:
        return None
    return BlockAttention(making.core, layout, making.earlier(FrozenDocuments).entries)
