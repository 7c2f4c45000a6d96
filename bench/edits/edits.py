# SPDX-License-Identifier: Apache-2.0
"""What agents and templates do to a conversation between two turns. All text behind stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from bench.edits.conversations import Conversation, as_json, results, user

CUT = "[removed: too long ago]"


@dataclass(frozen=True)
class Edit:
    """One kind.

    Attributes:
        name: as tables have it.
        change: the conversation as it is from the edit on.
        keeps_thoughts: whether the template keeps the thoughts of earlier turns.
        retries: whether the first question was asked before the edit takes it back.
    """

    name: str
    change: Callable[[Conversation, Random], Conversation]
    keeps_thoughts: bool = True
    retries: bool = False


def _none(conversation: Conversation, rng: Random) -> Conversation:
    return conversation


def _cut(conversation: Conversation, rng: Random) -> Conversation:
    """Agents drop the oldest results to save context."""
    loop = [*conversation.loop]
    where = results(loop)
    for place in where[: len(where) // 2]:
        loop[place] = {**loop[place], "content": CUT}
    return replace(conversation, loop=tuple(loop))


def _tools(conversation: Conversation, rng: Random) -> Conversation:
    """Another order, and one tool less."""
    kept = rng.sample(conversation.tools, len(conversation.tools) - 1)
    return replace(conversation, tools=tuple(kept))


def _date(conversation: Conversation, rng: Random) -> Conversation:
    system = conversation.loop[0]
    text = str(system["content"])
    changed = {**system, "content": text.replace("2026-", "2027-")}
    return replace(conversation, loop=(changed, *conversation.loop[1:]))


def _compacted(conversation: Conversation, rng: Random) -> Conversation:
    """The oldest third of the steps becomes a summary."""
    loop = conversation.loop
    where = results(loop)
    last = where[len(where) // 3 - 1]
    found = [as_json(loop[place])["query"] for place in where if place <= last]
    summary = user(f"Summary: {', '.join(found)} were looked up, and are in stock.")
    return replace(conversation, loop=(*loop[:2], summary, *loop[last + 1 :]))


def _message(conversation: Conversation, rng: Random) -> Conversation:
    """The user's first message is worded otherwise."""
    loop = [*conversation.loop]
    said = str(loop[1]["content"]).removeprefix("Look these articles up: ")
    loop[1] = user(f"Please search the catalogue for these: {said}")
    return replace(conversation, loop=tuple(loop))


def _noticed(conversation: Conversation, rng: Random) -> Conversation:
    """A notice stands in front that was not there, as frameworks remind a model of something."""
    notice = user("Notice: the shop closes at six today, and opens at nine tomorrow.")
    loop = conversation.loop
    return replace(conversation, loop=(loop[0], notice, *loop[1:]))


def _retried(conversation: Conversation, rng: Random) -> Conversation:
    """The last message is taken back, and another one sent."""
    questions = conversation.questions
    return replace(conversation, questions=(questions[-1], *questions[1:-1], questions[0]))


EDITS: Mapping[str, Edit] = MappingProxyType(
    {
        edit.name: edit
        for edit in (
            Edit("thoughts", _none, keeps_thoughts=False),
            Edit("results", _cut),
            Edit("tools", _tools),
            Edit("date", _date),
            Edit("compacted", _compacted),
            Edit("message", _message),
            Edit("notice", _noticed),
            Edit("retried", _retried, retries=True),
        )
    }
)
