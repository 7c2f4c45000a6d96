# SPDX-License-Identifier: Apache-2.0
"""Segments whose maps the workers have, or are to have, as the scheduler's process knows them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from segreuse_extras.states.messages import Placed
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.plan import BoolArray, IntArray

LEAST_TOKENS = 32
"""Shorter segments have no map: of most kinds each takes as much as the KV of thousands of
tokens."""


@dataclass
class Segment:
    """One of a namespace.

    Attributes:
        number: its name between the processes.
        tokens: int32 `[n]`.
        request_id: of the request that its map is noted of; None: the map is there.
    """

    number: int
    tokens: IntArray
    request_id: str | None


Key = tuple[int, bytes]
"""Digest of a namespace, and the tokens."""


class MapCatalogue:
    """Of one engine. What was used the longest ago is first.

    Args:
        on_evicted: called with how many maps made room.
    """

    def __init__(self, on_evicted: Callable[[int], None] = lambda evicted: None) -> None:
        self._segments: OrderedDict[Key, Segment] = OrderedDict()
        self._by_number: dict[int, Key] = {}
        self._heads: dict[tuple[int, int], set[Key]] = {}
        self._numbers = count()
        self._on_evicted = on_evicted
        self.capacity = 0
        """Most segments; 0 until the workers have said how large a map is."""

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_ready(self) -> int:
        """Those whose maps are there."""
        return sum(segment.request_id is None for segment in self._segments.values())

    def find(self, namespace: int, tokens: IntArray, covered: BoolArray) -> list[Placed]:
        """Segments of a prompt whose maps are there, from left to right, the longest first; none
        overlaps another.

        Args:
            namespace: its digest.
            tokens: int32, of the prompt.
            covered: bool of each, whether its KV was found.
        """
        if len(tokens) < LEAST_TOKENS or not self._segments:
            return []
        hashes = window_hashes(tokens, LEAST_TOKENS)
        heads = np.fromiter((head for space, head in self._heads if space == namespace), np.uint64)
        # How many tokens are found from each position on, without a hole.
        holes = np.append(np.flatnonzero(~covered), len(tokens))
        found, at = list[Placed](), 0
        for first in np.flatnonzero(np.isin(hashes, heads)).tolist():
            if first < at:
                continue
            known = int(holes[np.searchsorted(holes, first)]) - first
            placed = self._longest(namespace, tokens, first, known, int(hashes[first]))
            if placed is not None:
                found.append(placed)
                at = placed.stop
        return found

    def _longest(
        self, namespace: int, tokens: IntArray, first: int, known: int, head: int
    ) -> Placed | None:
        best: Placed | None = None
        for key in self._heads.get((namespace, head), ()):
            segment = self._segments[key]
            stop = first + len(segment.tokens)
            if segment.request_id is not None or len(segment.tokens) > known:
                continue
            if best is not None and stop <= best.stop:
                continue
            if np.array_equal(segment.tokens, tokens[first:stop]):
                best = Placed(segment.number, first, stop)
        return best

    def order(
        self, namespace: int, tokens: IntArray, request_id: str, kept: Collection[int]
    ) -> tuple[int | None, list[int]]:
        """A request is about to compute a segment.

        Args:
            namespace: its digest.
            tokens: int32, of the segment.
            request_id: of the request.
            kept: numbers of segments that must stay: plans of this step read them.

        Returns:
            The segment's number, None: its map is there, or on its way, or there is no room; and
            segments that made room.
        """
        key = namespace, tokens.tobytes()
        if len(tokens) < LEAST_TOKENS or key in self._segments:
            return None, []
        dropped = self._make_room(kept)
        if dropped is None:
            return None, []
        segment = Segment(next(self._numbers), tokens.copy(), request_id)
        self._segments[key] = segment
        self._by_number[segment.number] = key
        self._heads.setdefault(self._head(key), set()).add(key)
        return segment.number, dropped

    def _make_room(self, kept: Collection[int]) -> list[int] | None:
        """For one more. None: all others have to stay."""
        dropped: list[int] = []
        for segment in [*self._segments.values()]:
            if len(self._segments) < self.capacity:
                break
            if segment.number not in kept and segment.request_id is None:
                self.remove(segment.number)
                dropped.append(segment.number)
        self._on_evicted(len(dropped))
        return dropped if len(self._segments) < self.capacity else None

    def used(self, number: int) -> None:
        """A plan reads a segment's map."""
        self._segments.move_to_end(self._by_number[number])

    def complete(self, number: int) -> bool:
        """The workers have a map; whether anybody wants it still."""
        key = self._by_number.get(number)
        if key is not None:
            self._segments[key].request_id = None
        return key is not None

    def remove(self, number: int) -> None:
        """Forget a segment, if it is known."""
        key = self._by_number.pop(number, None)
        if key is None:
            return
        keys = self._heads[self._head(key)]
        keys.discard(key)
        if not keys:
            del self._heads[self._head(key)]
        del self._segments[key]

    def abandoned(self, request_id: str) -> list[int]:
        """A request has ended: numbers of segments of which it was to give maps, and has not."""
        numbers = [it.number for it in self._segments.values() if it.request_id == request_id]
        for number in numbers:
            self.remove(number)
        return numbers

    def clear(self) -> list[int]:
        """Forget all; their numbers."""
        numbers = [*self._by_number]
        for number in numbers:
            self.remove(number)
        return numbers

    def _head(self, key: Key) -> tuple[int, int]:
        tokens = np.frombuffer(key[1][: LEAST_TOKENS * 4], np.int32).copy()
        return key[0], int(window_hashes(tokens, LEAST_TOKENS)[0])

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())
