# SPDX-License-Identifier: Apache-2.0
"""The requests with extra keys that an API server has lately handled: their reports, in a ring."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_segreuse.options.parsing import EXTRA_KEYS, ORDERS

MAX_EXPLAINED = 20
"""Explanations that are kept: one of a long prompt takes megabytes, and clients ask for them."""

State = Literal["running", "finished", "stopped"]


@dataclass
class RecentRequest:
    """A request.

    Attributes:
        number: counted from 1 on, over the life of this API server.
        began_s: wall-clock time.
        state: `stopped`: it ended before it was finished: its client left, or there was an error.
        first_token_s, total_s: since it began.
        report: once it has ended, if the engine has sent one.
        token_ids: of the prompt, where texts are kept and the report explains it.
    """

    number: int
    request_id: str
    began_s: float
    state: State = "running"
    first_token_s: float | None = None
    total_s: float | None = None
    report: Mapping[str, Any] | None = None
    token_ids: array[int] | None = field(default=None, repr=False)

    @property
    def is_explained(self) -> bool:
        """Whether the report says where each stretch of the prompt comes from."""
        return self.report is not None and "explain" in self.report


class Recent:
    """The latest requests of one API server.

    Args:
        capacity: how many.
        keeps_text: whether the tokens of explained prompts are kept.
    """

    def __init__(self, capacity: int, keeps_text: bool = False) -> None:
        self.capacity = capacity
        self.keeps_text = keeps_text
        self._seen: dict[int, RecentRequest] = {}  # in order of arrival
        self._count = 0

    def get(self, number: int) -> RecentRequest | None:
        """A request, if it is still remembered."""
        return self._seen.get(number)

    def latest(self) -> list[RecentRequest]:
        """All that are remembered, the latest first."""
        return [*reversed(self._seen.values())]

    async def watch(
        self, request_id: str, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Passes the outputs of a request on, and remembers what they say."""
        began, seen = time.perf_counter(), self._begin(request_id)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if seen.first_token_s is None:
                        seen.first_token_s = time.perf_counter() - began
                    self._note(seen, output)
                    yield output
        finally:
            seen.total_s = time.perf_counter() - began
            if seen.state == "running":
                seen.state = "stopped"

    def _begin(self, request_id: str) -> RecentRequest:
        self._count += 1
        seen = self._seen[self._count] = RecentRequest(self._count, request_id, time.time())
        if len(self._seen) > self.capacity:
            del self._seen[next(iter(self._seen))]
        return seen

    def _note(self, seen: RecentRequest, output: Any) -> None:
        report = (output.kv_transfer_params or {}).get("segreuse")
        if report is not None:
            seen.report = report
            self._forget_explanations()
            if self.keeps_text and seen.is_explained:
                seen.token_ids = array("i", output.prompt_token_ids or ())
        if output.finished:
            seen.state = "finished"

    def _forget_explanations(self) -> None:
        explained = [seen for seen in self._seen.values() if seen.is_explained]
        for seen in explained[:-MAX_EXPLAINED]:
            assert seen.report is not None
            seen.report = {name: it for name, it in seen.report.items() if name != "explain"}
            seen.token_ids = None


_watching: Recent | None = None


@contextmanager
def watching(recent: Recent) -> Iterator[None]:
    """While this API server serves: its requests are remembered there."""
    global _watching
    _watching = recent if recent.capacity else None
    try:
        yield
    finally:
        _watching = None


def watched(
    request_id: str, params: Any, outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """The same outputs; remembered, if somebody watches and the request has extra keys.

    Requests that compute documents of knowledge bases, or compress them, are not clients'.
    """
    options = getattr(params, "extra_args", None) or {}
    is_own = not options.keys().isdisjoint(ORDERS)
    if _watching is None or options.get(EXTRA_KEYS) is None or is_own:
        return outputs
    return _watching.watch(request_id, outputs)
