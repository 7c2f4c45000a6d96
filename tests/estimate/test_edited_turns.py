# SPDX-License-Identifier: Apache-2.0
"""Which prompts of a log edit the one before of their session."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from segreuse_tools.estimate.block_cache import Sent
from segreuse_tools.estimate.edited_turns import EditedTurns, SessionPrompts

SIZE = 16
SYSTEM = [*range(48)]
A, B, C, D = ([*range(1000 * n, 1000 * n + 320)] for n in (1, 2, 3, 4))
THOUGHT = [*range(9000, 9005)]


def turns(*prompts: list[int], session: str | None = "one") -> EditedTurns:
    sessions = SessionPrompts(SIZE)
    for prompt in prompts:
        sessions.run(session, Sent.of(np.array(prompt, np.int32), SIZE, 0))
    return sessions.turns


def test_more_text_is_no_edit() -> None:
    assert turns(SYSTEM + A, SYSTEM + A + B, SYSTEM + A + B + C) == EditedTurns(2, 2)


def test_the_last_block_may_differ() -> None:
    """It ends with what asks for an answer."""
    assert turns(SYSTEM + A[:-1] + [7], SYSTEM + A + B) == EditedTurns(1, 1)


def test_dropped_text_is_an_edit() -> None:
    found = turns(SYSTEM + THOUGHT + A + B, SYSTEM + A + B + C)
    blocks = (len(A) + len(B) - (SIZE - len(THOUGHT))) // SIZE
    assert found == EditedTurns(1, 0, 1, len(A + B + C), blocks * SIZE)


def test_new_text_and_another_order_are_edits() -> None:
    assert turns(SYSTEM + A + B, SYSTEM + THOUGHT + A + B).edited == 1
    found = turns(SYSTEM + A + B, SYSTEM + B + A)
    assert astuple(found) == (1, 0, 1, len(A + B), len(A + B))


def test_a_prompt_that_shares_little_is_another_conversation() -> None:
    assert turns(SYSTEM + A + B, SYSTEM + C + D) == EditedTurns(1)
    few = A[:256]
    assert turns(SYSTEM + C + few, SYSTEM + D + few).edited == 1
    assert turns(SYSTEM + C + few[:240], SYSTEM + D + few[:240]).edited == 0


def test_another_answer_to_a_prompt_is_no_turn() -> None:
    first, edited = SYSTEM + THOUGHT + A + B, SYSTEM + A + B
    assert turns(first, first, first) == EditedTurns()
    assert turns(first, first, edited, edited) == turns(first, edited)
    assert turns(first, [*first, 1]) == EditedTurns(1, 1), "more text in the same block is one"


def test_a_shorter_prompt_that_is_a_beginning_takes_text_back() -> None:
    """Nothing stands behind the place."""
    assert turns(SYSTEM + A + B, SYSTEM + A) == EditedTurns(1)


@pytest.mark.parametrize("session", [None, "one"])
def test_sessions_are_told_apart(session: str | None) -> None:
    sessions = SessionPrompts(SIZE)
    sessions.run(session, Sent.of(np.array(SYSTEM + A, np.int32), SIZE, 0))
    other = Sent.of(np.array(SYSTEM + A + B, np.int32), SIZE, 0)
    sessions.run("other", other)
    sessions.run("one", other._replace(namespace=1))
    assert sessions.turns == EditedTurns()
    sessions.run(session, other)
    assert sessions.turns == EditedTurns(int(session is not None), int(session is not None))


def test_a_prompt_shorter_than_a_block_is_none_of_a_session() -> None:
    assert turns(SYSTEM[:15], SYSTEM + A) == EditedTurns()
    assert turns(SYSTEM[:16], [5, *SYSTEM]) == EditedTurns(1), "one block, which is another"
