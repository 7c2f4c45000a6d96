# SPDX-License-Identifier: Apache-2.0
"""How many later turns of a conversation are expected, by what this engine has seen."""

from unittest.mock import Mock

import pytest

from segreuse_extras.conversations import turns as module
from segreuse_extras.conversations.scheduler import session_of
from segreuse_extras.conversations.turns import Turns


def names(conversation: int, blocks: int) -> list[bytes]:
    """Of the first blocks of a conversation."""
    return [b"%d %d" % (conversation, block) for block in range(blocks)]


def conversations(turns: Turns, count: int, steps: int, hit: bool = True) -> None:
    """Each step is two blocks longer than the one before, and finds all of that, or nothing."""
    for conversation in range(count):
        for step in range(steps):
            blocks = 2 * (step + 1)
            turns.began(names(conversation, blocks), (blocks - 2) * hit, blocks)


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert Turns().later == 0


@pytest.mark.parametrize(("steps", "expected"), [(1, 0.0), (2, 1.0), (6, 5.0)])
def test_as_many_turns_are_expected_as_conversations_have(steps: int, expected: float) -> None:
    turns = Turns()
    conversations(turns, 2000, steps)
    assert turns.later == pytest.approx(expected, rel=0.1)


def test_prompts_that_only_begin_alike_continue_nothing() -> None:
    turns = Turns()
    for number in range(500):
        turns.began([*names(0, 9), b"%d" % number], 9, 10)
    assert turns.later == 0
    turns.began(names(0, 9), 9, 9)
    turns.began([], 0, 0)
    assert turns.later == 0, "nor does one that is shorter"


def test_turns_that_find_nothing_in_the_cache_do_not_count() -> None:
    found, lost = Turns(), Turns()
    conversations(found, 500, 4)
    conversations(lost, 500, 4, hit=False)
    assert lost.later == 0
    assert found.later > 2


def test_of_a_prompt_that_was_reused_only_what_is_exact_can_be_found() -> None:
    """What has no exact name says nothing of the size of the cache."""
    turns = Turns()
    for conversation in range(500):
        turns.began(names(conversation, 8), 0, 3)
        turns.began(names(conversation, 12), 3, 3)
    assert turns.later == pytest.approx(1, rel=0.1)


def test_few_prompts_say_little() -> None:
    turns = Turns()
    conversations(turns, 1, 3)
    assert 0 < turns.later < 0.2


def test_what_changes_is_learned_anew() -> None:
    turns = Turns()
    conversations(turns, 500, 6)
    for number in range(4000):
        turns.began([b"alone %d" % number], 0, 1)
    assert turns.later < 0.05


def test_only_so_many_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENDS", 3)
    turns = Turns()
    for conversation in range(5):
        turns.began(names(conversation, 2), 0, 2)
    assert turns.num_known == 3
    turns.began(names(0, 4), 2, 4)
    assert turns.later == 0, "of one that was forgotten"
    turns.began(names(4, 4), 2, 4)
    assert turns.later > 0


def test_a_session_continues_whatever_an_edit_has_changed() -> None:
    """Its later turns find what is left of the prefix, and count by that."""
    kept, broken, guessed = Turns(), Turns(), Turns()
    for number in range(500):
        for turns, session, hit in (
            (kept, b"%d" % number, 8),
            (broken, b"%d" % number, 0),
            (guessed, None, 0),
        ):
            turns.began(names(number, 8), 0, 8, session)
            turns.began([b"edited %d" % number, *names(number, 11)], hit, 12, session)
    assert kept.later == pytest.approx(1, rel=0.1)
    assert broken.later == 0
    assert guessed.later == 0
    assert broken.num_known == 500


def test_another_session_continues_nothing_although_it_begins_alike() -> None:
    turns = Turns()
    for number in range(500):
        turns.began(names(0, 8), 8, 8, b"%d" % number)
    assert turns.later == 0
    turns.began(names(0, 8), 8, 8, b"499")
    assert turns.later > 0


def test_only_so_many_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENDS", 3)
    turns = Turns()
    for number in range(5):
        turns.began(names(number, 2), 0, 2, b"%d" % number)
    assert turns.num_known == 3


def test_a_session_is_named_by_its_whole_id_and_namespace() -> None:
    long = "x" * 10_000
    known = [
        session_of(Mock(session_id=it), namespace)
        for it, namespace in ((long, 0), (f"{long}y", 0), (long, 1), ("\ud800", 0))
    ]
    assert len(set(known)) == 4
    assert all(it is not None and len(it) == 16 for it in known)
    assert session_of(Mock(session_id=long), 0) == known[0]


@pytest.mark.parametrize("session_id", [None, "", 7, b"bytes", ["a"], {}])
def test_what_is_no_id_names_no_session(session_id: object) -> None:
    assert session_of(Mock(session_id=session_id), 0) is None


def test_later_turns_are_those_that_were_seen_beside_a_few_that_were_not() -> None:
    turns = Turns()
    turns.began(names(0, 4), 0, 4)
    turns.began(names(0, 6), 3, 6)
    assert turns.later == pytest.approx(1 / (2 - 1 + 8) * 3 / (4 + 8))
    turns.began(names(0, 9), 7, 9)  # of the longer one, and all of that
    assert turns.later == pytest.approx(2 / (3 - 2 + 8) * (3 + 6) / (4 + 6 + 8))
    turns.began(names(1, 1), 0, 5)  # no more than it has is exact
    turns.began(names(1, 2), 2, 0)
    assert turns.later == pytest.approx(3 / (5 - 3 + 8) * (9 + 1) / (10 + 1 + 8))
    turns.began(names(1, 3), 2, 3)  # nothing of it was exact
    assert turns.later == pytest.approx(4 / (6 - 4 + 8) * 10 / 19)


def test_what_was_seen_counts_half_after_so_many_prompts() -> None:
    turns = Turns()
    conversations(turns, 256, 2)
    assert turns.later == pytest.approx(256 / (512 - 256 + 8) * 512 / (512 + 8))
    turns.began([b"alone"], 0, 1)
    assert turns.later == pytest.approx(128 / (257 - 128 + 8) * 256 / (256 + 8))


@pytest.mark.parametrize("session", [None, b"session"])
def test_so_many_ends_are_remembered_those_of_late_the_longest(session: bytes | None) -> None:
    turns = Turns()
    for number in range(16385):
        turns.began([b"%d" % number], 0, 1, session and b"%d" % number)
    assert turns.num_known == 16384
    turns.began([b"0", b"more"], 1, 2, session and b"0")
    assert turns.later == 0
    turns.began([b"2", b"more"], 1, 2, session and b"2")
    assert turns.later > 0
