# SPDX-License-Identifier: Apache-2.0
"""Documents that a waiting request needs and that are not in the cache are computed first, alone.

    match ──► wait_for ──► next ──► vLLM computes each as a request of its own ──► computed: pinned
                                          the request is planned, or ends ──► left: released

One waiting request at a time has its documents computed; the others wait for their turn. So
documents of several requests never hold so many blocks that none of these can run, and a document
that two of them need is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_segreuse.cache.isolated import IsolatedDocument
from vllm_segreuse.cache.listener import BlockListener
from vllm_segreuse.cache.planner import BlockPins

ATTEMPTS = 3
"""So often the documents of a request are computed, before it ends with an error."""

PREFIX = "segreuse-document-"
"""Of the ids of requests that compute a document."""


@dataclass
class _Turn:
    """The request whose documents are computed now.

    Attributes:
        request: as the engine knows it.
        running: ids of the requests that compute its documents.
        pinned: blocks that are held for it.
        attempts: how often something was missing.
    """

    request: Any
    running: set[str] = field(default_factory=set)
    pinned: list[int] = field(default_factory=list)
    attempts: int = 0


class ColdDocuments(BlockListener):
    """Of one engine.

    Args:
        pins: the block pool.
        make_request: a request of vLLM, of one output token, that computes a document as the
            waiting request would: its id, the waiting request, the tokens.
    """

    def __init__(
        self, pins: BlockPins, make_request: Callable[[str, Any, Sequence[int]], Any]
    ) -> None:
        self._pins = pins
        self._make_request = make_request
        self._turn: _Turn | None = None
        self._own: set[str] = set()
        self._to_add: list[Any] = []
        self._number = 0

    def is_own(self, request_id: str) -> bool:
        """Whether a request computes a document."""
        return request_id in self._own

    def wait_for(self, request: Any, missing: Sequence[IsolatedDocument]) -> bool:
        """A request cannot be planned before these documents are there.

        Returns:
            Whether to wait; False: they do not stay, however often they are computed.
        """
        turn = self._turn
        if turn is None:
            turn = self._turn = _Turn(request)
        if turn.request is not request or turn.running:
            return True
        if turn.attempts >= ATTEMPTS:
            return False
        turn.attempts += 1
        for tokens in dict.fromkeys(document.padded for document in missing):
            self._number += 1
            name = f"{PREFIX}{self._number}"
            self._own.add(name)
            turn.running.add(name)
            self._to_add.append(self._make_request(name, request, tokens))
        return True

    def take(self) -> list[Any]:
        """Requests that are to be added to the engine."""
        taken, self._to_add = self._to_add, []
        return taken

    def computed(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request that computes a document has ended.

        Args:
            block_ids: full blocks of its prompt, which it still holds; none if it was aborted.
        """
        self._own.discard(request_id)
        turn = self._turn
        if turn is not None and request_id in turn.running:
            turn.running.discard(request_id)
            self._pins.pin(list(block_ids))
            turn.pinned += block_ids

    def left(self, request: Any) -> None:
        """A request was admitted, or has ended: nothing is held for it any more."""
        turn = self._turn
        if turn is not None and turn.request is request:
            self._turn = None
            self._pins.unpin(turn.pinned)

    def resetting(self) -> None:
        """All KV becomes invalid: documents are computed again."""
        if self._turn is not None:
            self._pins.unpin(self._turn.pinned)
            self._turn.pinned = []
            self._turn.attempts = 0
