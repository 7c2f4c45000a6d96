# SPDX-License-Identifier: Apache-2.0
"""Jobs as requests: vLLM's managers count what a request does, and remember all of its keys."""

from __future__ import annotations

import itertools

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager


class Contexts:
    """One per manager."""

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._manager = manager
        self._open: dict[str, ReqContext] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Jobs that are under way."""
        return len(self._open)

    def begin(self) -> ReqContext:
        """A job begins."""
        context = ReqContext(f"segreuse-{next(self._numbers)}")
        self._manager.on_new_request(context)
        self._open[context.req_id] = context
        return context

    def end(self, context: ReqContext) -> None:
        """It has come to its end, unless `end_all` was called meanwhile."""
        if self._open.pop(context.req_id, None) is not None:
            self._manager.on_request_finished(context)

    def end_all(self) -> None:
        """The manager was reset."""
        for context in list(self._open.values()):
            self.end(context)
