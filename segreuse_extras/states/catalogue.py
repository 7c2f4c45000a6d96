# SPDX-License-Identifier: Apache-2.0
"""Segments whose maps the workers have, or are to have, as the scheduler's process knows them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from segreuse_extras.states.messages import Placed
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.plan import BoolArray, IntArray

LEAST_TOKENS = 32
"""Shorter segments have no map: of most kinds each takes as much as the KV of thousands of
tokens."""

_MARKS = 1 << 19

Key = tuple[int, bytes]
"""Digest of a namespace, and the tokens as int32."""
Head = tuple[int, int]
"""Digest of a namespace, and the hash of a segment's first `LEAST_TOKENS` tokens."""


@dataclass(frozen=True)
class Segment:
    """One of a namespace.

    Attributes:
        number: its name between the processes.
        head: how it begins.
        length: its tokens.
    """

    number: int
    head: Head
    length: int


class MapCatalogue:
    """Of one engine. What was used the longest ago is first.

    Of small maps there are thousands. What is asked here takes no longer for their number, only for
    the number of lengths of those that begin alike.

    Args:
        on_evicted: called with how many maps made room.
    """

    def __init__(self, on_evicted: Callable[[int], None] = lambda evicted: None) -> None:
        self._segments: OrderedDict[Key, Segment] = OrderedDict()
        self._by_number: dict[int, Key] = {}
        self._lengths: defaultdict[Head, Counter[int]] = defaultdict(Counter)
        self._marks = np.zeros(_MARKS, np.uint32)
        """How many heads have these last bits: nearly all positions of a prompt have none."""
        self._awaited: dict[int, str] = {}
        """By number of a segment, the request that its map is noted of; other maps are there."""
        self._numbers = count()
        self._on_evicted = on_evicted
        self.capacity = 0
        """Most segments; 0 until the workers have said how large a map is."""

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_ready(self) -> int:
        """Those whose maps are there."""
        return len(self._segments) - len(self._awaited)

    def find(self, namespace: int, tokens: IntArray, covered: BoolArray) -> list[Placed]:
        """Segments of a prompt whose maps are there, from left to right, the longest first; none
        overlaps another.

        Args:
            namespace: its digest.
            tokens: int32, of the prompt.
            covered: bool of each, whether its KV was found.
        """
        hashes = window_hashes(tokens, LEAST_TOKENS)
        firsts = np.flatnonzero(self._marks[hashes % _MARKS])
        holes = np.append(np.flatnonzero(~covered), len(tokens))
        stops = holes[np.searchsorted(holes, firsts)]  # up to there KV is found without a hole
        found, at = list[Placed](), 0
        for first, stop, head in zip(
            firsts.tolist(), stops.tolist(), hashes[firsts].tolist(), strict=True
        ):
            if first >= at:
                placed = self._longest((namespace, head), tokens[:stop], first)
                if placed is not None:
                    found.append(placed)
                    at = placed.stop
        return found

    def _longest(self, head: Head, tokens: IntArray, first: int) -> Placed | None:
        """The longest segment that begins at a token, of those that begin like this."""
        for length in sorted(self._lengths.get(head, ()), reverse=True):
            stop = first + length
            if stop <= len(tokens):
                segment = self._segments.get((head[0], tokens[first:stop].tobytes()))
                if segment is not None and segment.number not in self._awaited:
                    return Placed(segment.number, first, stop)
        return None

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
        head = namespace, int(window_hashes(tokens[:LEAST_TOKENS], LEAST_TOKENS)[0])
        segment = Segment(next(self._numbers), head, len(tokens))
        self._segments[key] = segment
        self._by_number[segment.number] = key
        self._lengths[head][segment.length] += 1
        self._marks[head[1] % _MARKS] += 1
        self._awaited[segment.number] = request_id
        return segment.number, dropped

    def _make_room(self, kept: Collection[int]) -> list[int] | None:
        """For one more. None: all others have to stay."""
        missing = max(0, len(self._segments) + 1 - self.capacity)
        oldest = (it.number for it in self._segments.values() if it.number not in self._awaited)
        dropped = [*islice((number for number in oldest if number not in kept), missing)]
        if len(dropped) < missing:
            return None
        for number in dropped:
            self.remove(number)
        self._on_evicted(len(dropped))
        return dropped

    def used(self, number: int) -> None:
        """A plan reads a segment's map."""
        self._segments.move_to_end(self._by_number[number])

    def complete(self, number: int) -> bool:
        """The workers have a map; whether anybody wants it still."""
        self._awaited.pop(number, None)
        return number in self._by_number

    def remove(self, number: int) -> None:
        """Forget a segment, if it is known."""
        key = self._by_number.pop(number, None)
        if key is None:
            return
        segment = self._segments.pop(key)
        self._awaited.pop(number, None)
        self._marks[segment.head[1] % _MARKS] -= 1
        lengths = self._lengths[segment.head]
        lengths[segment.length] -= 1
        if not lengths[segment.length]:
            del lengths[segment.length]
        if not lengths:
            del self._lengths[segment.head]

    def abandoned(self, request_id: str) -> list[int]:
        """A request has ended: numbers of segments of which it was to give maps, and has not."""
        numbers = [number for number, by in self._awaited.items() if by == request_id]
        for number in numbers:
            self.remove(number)
        return numbers

    def clear(self) -> list[int]:
        """Forget all; their numbers."""
        numbers = [*self._by_number]
        for number in numbers:
            self.remove(number)
        return numbers

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())
