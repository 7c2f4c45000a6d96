# SPDX-License-Identifier: Apache-2.0
"""Requests that reuse only KV whose context is in front of it."""

from __future__ import annotations

from dataclasses import replace

from segreuse_extras.context.finder import SameContextFinder
from segreuse_extras.context.metrics import OTHER_CONTEXT
from segreuse_extras.context.options import SAME, ContextOptions
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making


class SameContext(Feature):
    """Of one engine."""

    name = "context"

    def __init__(self, making: Making) -> None:
        self._core = making.core
        self._by_content = making.by_content
        # Deeper donors are refused: it finds those beside them.
        self._of_exact = ContentFinder(making.core.index, max_depth=0)
        self._finders: dict[str, SameContextFinder] = {}
        self._refused: dict[str, int] = {}

    def admit(self, arriving: Arriving) -> None:
        """Let it find nothing else."""
        tracked = arriving.tracked
        found = tracked.method.finder
        if ContextOptions.of(arriving.options).context != SAME or found.is_exact:
            return
        if tracked.is_required or tracked.names_documents:
            return
        inner = self._of_exact if found is self._by_content else found
        finder = SameContextFinder(inner, self._core.index)
        tracked.method = replace(tracked.method, finder=finder, left_behind=())
        self._finders[tracked.request_id] = finder

    def allocated(self, admitted: Admitted) -> None:
        """What was refused counts when it is first admitted, as all of its report does."""
        finder = self._finders.get(admitted.request.request_id)
        if finder is not None and admitted.is_first:
            self._refused[admitted.request.request_id] = finder.refused

    def finished(self, ending: Ending) -> None:
        """Say how much was refused."""
        self._finders.pop(ending.request.request_id, None)
        refused = self._refused.pop(ending.request.request_id, 0)
        if refused:
            ending.add(other_context_tokens=refused)
            self._core.stats.inc(OTHER_CONTEXT, refused)


def start(making: Making) -> SameContext:
    """That of an engine."""
    return SameContext(making)
