# SPDX-License-Identifier: Apache-2.0
"""The catalogue of maps against one that looks at every segment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.states.catalogue import LEAST_TOKENS, MapCatalogue
from segreuse_extras.states.messages import Placed

TEXT = np.array([*[1] * 45, *range(2, 40), *[1] * 40, *range(2, 20)], np.int32)
"""Segments of it begin alike in many places, overlap, and are equal to others."""

STOPS = 30, 31, 32, 40, 45, 50, 90, 100, 140
POSITIONS = st.integers(0, len(TEXT))
SPACES = st.integers(0, 1)
REQUESTS = st.sampled_from(["one", "two"])
CALLS = st.one_of(
    st.tuples(st.just("order"), SPACES, st.integers(0, 90), st.sampled_from(STOPS), REQUESTS),
    st.tuples(st.just("complete"), st.integers(0, 12)),
    st.tuples(st.just("remove"), st.integers(0, 12)),
    st.tuples(st.just("used"), st.integers(0, 12)),
    st.tuples(st.just("abandoned"), REQUESTS),
    st.tuples(st.just("clear")),
    st.tuples(st.just("find"), SPACES, POSITIONS, POSITIONS, st.sets(POSITIONS, max_size=2)),
)


@dataclass
class Known:
    number: int
    space: int
    tokens: list[int]
    request_id: str | None


class Plain:
    """A list of segments; what was used the longest ago is first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.known: list[Known] = []
        self.next = 0

    def find(self, space: int, tokens: list[int], covered: list[bool]) -> list[Placed]:
        found, at = list[Placed](), 0
        while at < len(tokens):
            fits = [
                it
                for it in self.known
                if (it.space, it.request_id) == (space, None)
                and tokens[at : at + len(it.tokens)] == it.tokens
                and all(covered[at : at + len(it.tokens)])
            ]
            if fits:
                best = max(fits, key=lambda it: len(it.tokens))
                found.append(Placed(best.number, at, at + len(best.tokens)))
                at = found[-1].stop
            else:
                at += 1
        return found

    def order(
        self, space: int, tokens: list[int], request_id: str, kept: Collection[int]
    ) -> tuple[int | None, list[int]]:
        if len(tokens) < LEAST_TOKENS or (space, tokens) in [
            (it.space, it.tokens) for it in self.known
        ]:
            return None, []
        dropped: list[int] = []
        if len(self.known) >= self.capacity:
            free = [
                it.number for it in self.known if it.request_id is None and it.number not in kept
            ]
            if not free:
                return None, []
            dropped = free[:1]
            self.remove(dropped[0])
        self.known.append(Known(self.next, space, tokens, request_id))
        self.next += 1
        return self.next - 1, dropped

    def remove(self, number: int) -> None:
        self.known = [it for it in self.known if it.number != number]

    def used(self, number: int) -> None:
        self.known.sort(key=lambda it: it.number == number)

    def complete(self, number: int) -> bool:
        for it in self.known:
            if it.number == number:
                it.request_id = None
        return number in [it.number for it in self.known]

    def abandoned(self, request_id: str) -> list[int]:
        gone = [it.number for it in self.known if it.request_id == request_id]
        for number in gone:
            self.remove(number)
        return gone

    def clear(self) -> list[int]:
        gone = [it.number for it in self.known]
        self.known = []
        return gone


def both_say(catalogue: MapCatalogue, plain: Plain, call: tuple) -> tuple[object, object]:
    match call:
        case ("order", space, first, stop, request_id):
            tokens, kept = TEXT[first:stop], {plain.next - 2}
            given = space, tokens.tolist(), request_id, kept
            return catalogue.order(space, tokens, request_id, kept), plain.order(*given)
        case ("find", space, first, stop, holes):
            tokens = TEXT[first:stop]
            covered = np.array([at not in holes for at in range(len(tokens))], np.bool_)
            given = space, tokens.tolist(), covered.tolist()
            return catalogue.find(space, tokens, covered), plain.find(*given)
        case ("used", number):
            if number in [it.number for it in plain.known]:
                return catalogue.used(number), plain.used(number)
            return None, None
        case ("clear",):
            return sorted(catalogue.clear()), sorted(plain.clear())
        case (name, argument):
            return getattr(catalogue, name)(argument), getattr(plain, name)(argument)
    raise AssertionError(call)


@given(st.integers(0, 5), st.lists(CALLS, max_size=40))
def test_all_that_is_said_is_what_a_list_of_segments_says(
    capacity: int, calls: list[tuple]
) -> None:
    catalogue, plain = MapCatalogue(), Plain(capacity)
    catalogue.capacity = capacity
    for call in calls:
        found, expected = both_say(catalogue, plain, call)
        assert found == expected, call
        assert [it.number for it in catalogue] == [it.number for it in plain.known]
        assert catalogue.num_ready == sum(it.request_id is None for it in plain.known)
        assert catalogue.find(0, TEXT, np.ones(len(TEXT), np.bool_)) == plain.find(
            0, TEXT.tolist(), [True] * len(TEXT)
        )
    assert {*catalogue.clear()} == {it.number for it in plain.known}
    for number in range(plain.next):  # nothing of it is left behind
        catalogue.remove(number)
    assert len(catalogue) == catalogue.num_ready == 0
