# SPDX-License-Identifier: Apache-2.0
"""Cold documents are computed once, held until they were used, and not for ever."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from segreuse_extras.trained.cold_documents import ColdDocuments
from segreuse_extras.trained.finder import IsolatedDocument


class Pins:
    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def pin(self, block_ids: list[int]) -> None:
        self.held.update(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values()) >= 0, "released twice"

    def idle(self, block_ids: Iterable[int]) -> set[int]:
        return set()

    def num_free_blocks(self) -> int:
        return 99


class World:
    """Requests are their names; each needs as many blocks as a test says."""

    def __init__(self, capacity: int = 100) -> None:
        self.pins = Pins()
        self.documents: ColdDocuments[Any] = ColdDocuments(
            self.pins, capacity, lambda name, asker, tokens: (name, asker, tokens)
        )

    def cold(self, asker: str, *tokens: int) -> IsolatedDocument:
        return IsolatedDocument(0, 0, tokens, lambda: self.documents.held(asker, tokens))

    def wait(
        self, asker: str, *documents: tuple[int, ...], blocks: int = 10, space: bytes = b"mine"
    ):
        wanted = [self.cold(asker, *tokens) for tokens in documents]
        return self.documents.wait_for(asker, asker, space, wanted, blocks)

    def added(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return self.documents.take()

    @property
    def held(self) -> Counter[int]:
        return +self.pins.held


def names(added: list[Any]) -> list[str]:
    return [name for name, _, _ in added]


def test_documents_are_computed_once_and_held_for_the_request() -> None:
    world = World()
    assert world.wait("one", (1, 2), (3,), (1, 2))
    added = world.added()
    assert [(asker, tokens) for _, asker, tokens in added] == [("one", (1, 2)), ("one", (3,))]
    assert world.added() == []
    first, second = names(added)
    documents = world.documents
    assert documents.is_own(first)
    assert not documents.is_own("one")
    documents.computed(first, [7, 8])
    assert world.wait("one", (3,))
    assert world.added() == [], "it is being computed"
    documents.computed(second, [9])
    assert not documents.is_own(second)
    assert world.held == {7: 1, 8: 1, 9: 1}
    found = documents.held("one", (1, 2))
    assert found is not None
    assert found.tolist() == [7, 8]
    assert documents.held("two", (1, 2)) is None, "it may be of another namespace"
    documents.left("one")
    assert world.held == {}
    assert documents.held("one", (1, 2)) is None


def test_who_waits_for_room_learns_that_others_hold_some() -> None:
    world = World()
    world.wait("one", (1,))
    assert not world.documents.holds_for_others("two"), "nothing is computed yet"
    (name,) = names(world.added())
    world.documents.computed(name, [7])
    assert world.documents.holds_for_others("two")
    assert not world.documents.holds_for_others("one")


def test_documents_that_are_there_are_held_while_others_are_computed() -> None:
    world = World()
    warm = IsolatedDocument(0, 0, (5,), lambda: np.array([4], np.int32))
    for _ in range(2):
        world.documents.wait_for("one", "one", b"mine", [warm, world.cold("one", 1)], 10)
    assert world.held == {4: 1}
    world.documents.left("one")
    assert world.held == {}


def test_what_two_requests_of_a_namespace_need_is_computed_once() -> None:
    world = World()
    world.wait("one", (1,), (2,))
    world.wait("two", (2,), (1,))
    world.wait("foreign", (1,), space=b"theirs")
    added = world.added()
    assert [(asker, tokens) for _, asker, tokens in added] == [
        *(("one", (1,)), ("one", (2,))),
        ("foreign", (1,)),
    ]
    world.documents.computed(added[0][0], [7])
    assert world.held == {7: 2}
    world.documents.left("one")
    assert world.held == {7: 1}


def test_so_many_have_a_turn_as_fit_beside_each_other() -> None:
    world = World(capacity=25)
    for asker in ("one", "two"):
        assert world.wait(asker, (1,), blocks=10)
    assert world.wait("three", (3,), blocks=10)
    assert world.wait("four", (4,), blocks=1), "it does not overtake the third"
    assert [tokens for _, _, tokens in world.added()] == [(1,)]
    world.documents.left("one")
    assert world.wait("four", (4,), blocks=1)
    assert world.added() == []
    assert world.wait("three", (3,), blocks=10)
    assert world.wait("four", (4,), blocks=1)
    assert [tokens for _, _, tokens in world.added()] == [(3,), (4,)]


def test_who_is_next_and_leaves_keeps_nobody() -> None:
    world = World(capacity=15)
    world.wait("one", (1,))
    world.wait("two", (2,))
    world.documents.left("two")
    assert world.wait("three", (3,), blocks=5)
    assert [tokens for _, _, tokens in world.added()] == [(1,), (3,)]


def test_what_never_fits_is_an_error_at_once() -> None:
    world = World(capacity=9)
    assert not world.wait("one", (1,), blocks=10)
    assert world.added() == []
    assert world.wait("one", (1,), blocks=9)


def test_a_document_that_nobody_waits_for_any_more_is_not_held() -> None:
    world = World()
    world.wait("one", (1,))
    (name,) = names(world.added())
    world.documents.left("one")
    world.documents.computed(name, [5])
    assert world.held == {}


def test_documents_that_do_not_stay_are_an_error() -> None:
    world = World()
    for _ in range(3):
        assert world.wait("one", (1,))
        (name,) = names(world.added())
        world.documents.computed(name, [])
    assert not world.wait("one", (1,))


@pytest.mark.parametrize("askers", [("one",), ("one", "two")])
def test_a_reset_releases_what_is_held(askers: tuple[str, ...]) -> None:
    world = World()
    for block in (5, 6):
        for asker in askers:
            world.wait(asker, (1,))
        (name,) = names(world.added())
        world.documents.computed(name, [block])
        assert world.held == {block: len(askers)}
        world.documents.resetting()
        assert world.held == {}
    for asker in askers:
        world.documents.left(asker)
    assert world.held == {}


def test_a_reset_is_no_fault_of_who_waits() -> None:
    world = World()
    for _ in range(6):
        assert world.wait("one", (1,))
        (name,) = names(world.added())
        world.documents.resetting()
        world.documents.computed(name, [])
    assert world.wait("one", (1,))


ASKERS = st.sampled_from("abcde")


class AnyOrder(RuleBasedStateMachine):
    """Turns, computations and ends in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(capacity=12)
        self.block = 0
        self.running: list[str] = []
        self.blocks: dict[str, int] = {}

    @rule(asker=ASKERS, tokens=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def asks(self, asker: str, tokens: list[int]) -> None:
        blocks = self.blocks.setdefault(asker, 2 + 2 * len(tokens))
        self.world.wait(asker, *((token,) for token in tokens), blocks=blocks)
        self.running += names(self.world.added())

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), done=st.booleans())
    def ends(self, which: int, done: bool) -> None:
        name = self.running.pop(which % len(self.running))
        self.block += 1
        self.world.documents.computed(name, [self.block] if done else [])

    @rule(asker=ASKERS)
    def leaves(self, asker: str) -> None:
        self.blocks.pop(asker, None)
        self.world.documents.left(asker)

    @rule()
    def resets(self) -> None:
        self.world.documents.resetting()

    @invariant()
    def turns_fit_and_hold_what_is_pinned(self) -> None:
        turns = self.world.documents.turns
        assert sum(turn.num_blocks for turn in turns.values()) <= 12
        held: Counter[int] = Counter()
        for turn in turns.values():
            assert turn.running <= {*self.running}
            for blocks in turn.held.values():
                held.update(blocks.tolist())
        assert held == self.world.held

    def teardown(self) -> None:
        for asker in "abcde":
            self.world.documents.left(asker)
        assert self.world.held == {}


TestAnyOrder = AnyOrder.TestCase
