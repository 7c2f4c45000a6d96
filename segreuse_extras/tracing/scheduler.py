# SPDX-License-Identifier: Apache-2.0
"""Spans of searches and plans in vLLM's traces."""

from __future__ import annotations

from segreuse_extras.tracing.spans import admitted_spans, headers_of, is_traced
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making


class Tracing(Feature):
    """Of an engine whose traces are exported."""

    name = "tracing"

    def __init__(self) -> None:
        self._written: set[str] = set()

    def admit(self, arriving: Arriving) -> None:
        """Its plans carry the context that it came with."""
        tracked = arriving.tracked
        tracked.tags = tracked.tags._replace(trace_headers=headers_of(arriving.request))

    def allocated(self, admitted: Admitted) -> None:
        """Write the spans of its search and plan, once: a request whose plan was called back is
        admitted anew."""
        request_id = admitted.request.request_id
        if admitted.is_first and request_id not in self._written:
            self._written.add(request_id)
            admitted_spans(admitted.tracked)

    def finished(self, ending: Ending) -> None:
        """Its id may come again."""
        self._written.discard(ending.request.request_id)


def start(making: Making) -> Tracing | None:
    """That of an engine; None: vLLM exports no traces."""
    return Tracing() if is_traced(making.core.vllm_config) else None
