# SPDX-License-Identifier: Apache-2.0
"""Documents that a waiting request needs and that are not in the cache are computed first, alone.

    match ──► wait_for ──► take ──► vLLM computes each as a request of its own ──► computed: held
                                          the request is planned, or ends ──► left: released

Requests whose documents are computed or held have a *turn*. So many have one at a time as the KV
cache can hold with all of their blocks, and a request that waits for its turn is not overtaken: the
documents of several requests never hold so many blocks that none of these can run. A document that
several of them need is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from segreuse_extras.trained.finder import IsolatedDocument
from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.plan import IntArray
from vllm_segreuse.scheduling.planner import BlockPins

ATTEMPTS = 3
"""So often the documents of a request are computed, before it ends with an error."""

PREFIX = "segreuse-document-"
"""Of the ids of requests that compute a document."""

R = TypeVar("R")
"""A request as the engine knows it."""

Tokens = tuple[int, ...]


@dataclass
class DocumentTurn:
    """Of a waiting request.

    Attributes:
        num_blocks: most blocks that it and its documents take at a time.
        running: ids of the requests that compute its documents.
        held: blocks of its documents, which are pinned.
        attempts: how often something was missing.
    """

    num_blocks: int
    running: set[str] = field(default_factory=set)
    held: dict[Tokens, IntArray] = field(default_factory=dict)
    attempts: int = 0


class ColdDocuments(BlockListener, Generic[R]):
    """Of one engine.

    Args:
        pins: the block pool.
        capacity: blocks that requests can have.
        make_request: a request of vLLM, of one output token, that computes a document as the
            waiting request would: its id, the waiting request, the tokens.
    """

    def __init__(
        self,
        pins: BlockPins,
        capacity: int,
        make_request: Callable[[str, R, Sequence[int]], R],
    ) -> None:
        self.capacity = capacity
        self._pins = pins
        self._make_request = make_request
        self._turns: dict[str, DocumentTurn] = {}  # by id of the waiting request
        self._next: str | None = None
        self._own: dict[str, tuple[bytes, Tokens]] = {}  # namespace and document, by id
        self._to_add: list[R] = []
        self._number = 0

    @property
    def turns(self) -> Mapping[str, DocumentTurn]:
        """The requests that have a turn, by id."""
        return self._turns

    @property
    def is_idle(self) -> bool:
        """Whether nothing is remembered of any request."""
        return not (self._turns or self._own or self._to_add or self._next is not None)

    def is_own(self, request_id: str) -> bool:
        """Whether a request computes a document."""
        return request_id in self._own

    def held(self, request_id: str, tokens: Tokens) -> IntArray | None:
        """Blocks of a document that are held for a waiting request; None: there are none."""
        turn = self._turns.get(request_id)
        return None if turn is None else turn.held.get(tokens)

    def holds_for_others(self, request_id: str) -> bool:
        """Whether blocks are held for others than this request, and become free once these run."""
        return any(turn.held for asker, turn in self._turns.items() if asker != request_id)

    def wait_for(
        self,
        request_id: str,
        request: R,
        namespace: bytes,
        documents: Iterable[IsolatedDocument],
        num_blocks: int,
    ) -> bool:
        """A request cannot be planned before these documents are there.

        Args:
            namespace: key of the request's. Its id may mean another one by the time a document is
                computed, since whoever has asked for it may have left.
            documents: those that it needs, with those that are there.
            num_blocks: most blocks that it and its documents take at a time.

        Returns:
            Whether to wait; False: they do not fit, or do not stay, however often they are
            computed.
        """
        turn = self._turns.get(request_id)
        if turn is None:
            if num_blocks > self.capacity:
                return False
            if not self._may_begin(request_id, num_blocks):
                return True
            turn = self._turns[request_id] = DocumentTurn(num_blocks)
        if turn.running:
            return True
        if turn.attempts >= ATTEMPTS:
            return False
        turn.attempts += 1
        for document in documents:
            tokens = document.padded
            blocks = document.resident()
            if blocks is None:
                turn.running.add(self._computing(request, namespace, tokens))
            elif tokens not in turn.held:
                self._hold(turn, tokens, blocks)
        return True

    def _may_begin(self, request_id: str, num_blocks: int) -> bool:
        """Whether a turn of so many blocks may begin: none overtakes one that there was no room
        for."""
        taken = sum(turn.num_blocks for turn in self._turns.values())
        if self._next not in (None, request_id) or taken + num_blocks > self.capacity:
            self._next = self._next or request_id
            return False
        self._next = None
        return True

    def _computing(self, request: R, namespace: bytes, tokens: Tokens) -> str:
        """Id of the request that computes a document for this one, perhaps for others, too."""
        for name, computed in self._own.items():
            if computed == (namespace, tokens):
                return name
        self._number += 1
        name = f"{PREFIX}{self._number}"
        self._own[name] = namespace, tokens
        self._to_add.append(self._make_request(name, request, tokens))
        return name

    def _hold(self, turn: DocumentTurn, tokens: Tokens, blocks: IntArray) -> None:
        self._pins.pin(blocks.tolist())
        turn.held[tokens] = blocks

    def take(self) -> list[R]:
        """Requests that are to be added to the engine."""
        taken, self._to_add = self._to_add, []
        return taken

    def computed(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request that computes a document has ended.

        Args:
            block_ids: full blocks of its prompt, which it still holds; none if it was aborted.
        """
        _, tokens = self._own.pop(request_id)
        for turn in self._turns.values():
            if request_id in turn.running:
                turn.running.discard(request_id)
                if block_ids:
                    self._hold(turn, tokens, np.asarray(block_ids, np.int32))

    def left(self, request_id: str) -> None:
        """A request was admitted, or has ended: nothing is held for it any more."""
        if self._next == request_id:
            self._next = None
        turn = self._turns.pop(request_id, None)
        if turn is not None:
            self._release(turn)

    def resetting(self) -> None:
        """All KV becomes invalid: documents are computed again."""
        for turn in self._turns.values():
            self._release(turn)
            turn.attempts = 0

    def starving(self, request_id: str) -> None:
        """Nobody runs, and a request that is first in the queue has no room beside what is held for
        others: that is computed again once it has run. A document of a turn has room beside all
        others, and would only be computed in turns with these."""
        if self.is_own(request_id):
            return
        for asker, turn in self._turns.items():
            if asker != request_id and turn.held:
                self._release(turn)
                turn.attempts = 0

    def _release(self, turn: DocumentTurn) -> None:
        for blocks in turn.held.values():
            self._pins.unpin(blocks.tolist())
        turn.held.clear()
