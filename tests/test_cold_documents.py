# SPDX-License-Identifier: Apache-2.0
"""Cold documents are computed once, held until they were used, and not for ever."""

from collections import Counter
from typing import Any

from vllm_segreuse.cache.isolated import IsolatedDocument
from vllm_segreuse.cold_documents import ATTEMPTS, ColdDocuments


class Pins:
    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def pin(self, block_ids: list[int]) -> None:
        self.held.update(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        self.held.subtract(block_ids)

    def room_beside(self, block_ids: list[int]) -> int:
        return 99


def cold(*tokens: int) -> IsolatedDocument:
    return IsolatedDocument(0, 0, tokens, lambda: None)


def make() -> tuple[ColdDocuments, Pins]:
    pins = Pins()
    return ColdDocuments(pins, lambda name, asker, tokens: (name, asker, tokens)), pins


def names(added: list[Any]) -> list[str]:
    return [name for name, _, _ in added]


def test_documents_are_computed_once_and_held_for_the_request() -> None:
    documents, pins = make()
    assert documents.wait_for("one", [cold(1, 2), cold(3), cold(1, 2)])
    added = documents.take()
    assert [(asker, tokens) for _, asker, tokens in added] == [("one", (1, 2)), ("one", (3,))]
    assert documents.take() == []
    first, second = names(added)
    assert documents.is_own(first)
    assert not documents.is_own("one")
    documents.computed(first, [7, 8])
    assert documents.wait_for("one", [cold(3)])
    assert documents.take() == [], "it is being computed"
    documents.computed(second, [9])
    assert not documents.is_own(second)
    assert +pins.held == {7: 1, 8: 1, 9: 1}
    documents.left("one")
    assert +pins.held == {}


def test_requests_take_turns() -> None:
    documents, _ = make()
    assert documents.wait_for("one", [cold(1)])
    assert documents.wait_for("two", [cold(2)])
    assert [asker for _, asker, _ in documents.take()] == ["one"]
    documents.left("two")
    documents.left("one")
    assert documents.wait_for("two", [cold(2)])
    assert [asker for _, asker, _ in documents.take()] == ["two"]


def test_a_document_that_nobody_waits_for_any_more_is_not_held() -> None:
    documents, pins = make()
    documents.wait_for("one", [cold(1)])
    (name,) = names(documents.take())
    documents.left("one")
    documents.computed(name, [5])
    assert +pins.held == {}


def test_documents_that_do_not_stay_are_an_error() -> None:
    documents, _ = make()
    for _ in range(ATTEMPTS):
        assert documents.wait_for("one", [cold(1)])
        (name,) = names(documents.take())
        documents.computed(name, [])
    assert not documents.wait_for("one", [cold(1)])


def test_a_reset_releases_what_is_held() -> None:
    documents, pins = make()
    documents.wait_for("one", [cold(1)])
    (name,) = names(documents.take())
    documents.computed(name, [5])
    documents.resetting()
    assert +pins.held == {}
    assert documents.wait_for("one", [cold(1)])
    (name,) = names(documents.take())
    documents.computed(name, [6])
    assert +pins.held == {6: 1}
    documents.left("one")
    assert +pins.held == {}
