# SPDX-License-Identifier: Apache-2.0
"""Prompts as the estimate without an engine replays them, whatever log they are from."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from segreuse_tools.estimate.traces.reading import Trace
from segreuse_tools.estimate.traces.request import PromptPart, tokens_of
from vllm_segreuse.plan import IntArray


class PromptTokens(NamedTuple):
    """A prompt.

    Attributes:
        tokens: int32 `[tokens]`, at least one.
        answer_tokens: that are generated behind it.
        session: of the user or conversation; None: not known.
        documents: what it shares with others, for a router.
        namespace: in which segments are found; None: none are.
        parts: of which a trace says that it is made; None: it is text.
        time_s: when it was sent; None: not known.
        is_alone: whether its request has no other prompts: those of one are no turns of each other.
        salt: what separates all that is cached of it from prompts of other salts; "": nothing.
    """

    tokens: IntArray
    answer_tokens: int
    session: str | None
    documents: list[str]
    namespace: int | None = 0
    parts: tuple[PromptPart, ...] | None = None
    time_s: float | None = None
    is_alone: bool = True
    salt: str = ""


def of_trace(trace: Trace) -> Iterator[PromptTokens]:
    """Those of a trace, all in one namespace."""
    for request in trace.requests():
        yield PromptTokens(
            tokens_of(request.parts),
            request.output_tokens,
            request.session,
            [str(id) for id in request.documents],
            parts=request.parts,
            time_s=request.time_s,
        )


class Router:
    """Chooses an engine for each prompt.

    Args:
        engines: how many there are.
        by: "session", or "documents" as `segreuse_tools.routing` does; prompts without go round.
    """

    def __init__(self, engines: int, by: str) -> None:
        self.engines = engines
        self.by = by
        self._round = itertools.count()

    def choose(self, prompt: PromptTokens) -> int:
        """Number of an engine."""
        if self.engines == 1:
            return 0
        if self.by == "session":
            keys = [] if prompt.session is None else [prompt.session]
        else:
            keys = prompt.documents
        hashes = (hashlib.sha256(key.encode()).digest() for key in keys)
        smallest = min(hashes, default=None)
        if smallest is None:
            return next(self._round) % self.engines
        return int.from_bytes(smallest[:8], "big") % self.engines
