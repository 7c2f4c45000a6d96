# SPDX-License-Identifier: Apache-2.0
"""Requests of several conversations in the order in which a server gets them.

single  one conversation: its history only grows
users   three users in turns, the same instructions at the top of every prompt
clock   the same with session and time in front of the instructions: no two prefixes are equal
quotes  three agents with other instructions, one after the other: each quotes what those before
        it have found, under new numbers and times
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from types import MappingProxyType
from typing import Any

from bench.agents.episodes import SEARCH, Episode, Shop, Step, episode, shop
from bench.quality import seeds
from examples.agents import react
from examples.agents.tools import Tools

USERS = 3
ROLES = ("buyer for a hotel", "planner of a school trip", "clerk who checks invoices")


@dataclass(frozen=True)
class Conversation:
    """One agent's instructions, and its episode."""

    system: str
    user: str
    episode: Episode


@dataclass(frozen=True)
class Request:
    """A step of a conversation, by their numbers."""

    conversation: int
    step: int


@dataclass(frozen=True)
class Trace:
    """Conversations and the order of their steps.

    Attributes:
        kind, number: which trace it is.
        shop: what the conversations are about.
        conversations: of the trace.
        requests: every step of them once.
    """

    kind: str
    number: int
    shop: Shop
    conversations: tuple[Conversation, ...]
    requests: tuple[Request, ...]

    def label(self, request: Request) -> Step:
        """What is right there."""
        return self.conversations[request.conversation].episode.steps[request.step]


def draw(kind: str, number: int, which: str) -> Trace:
    """A trace of a set of seeds; the same at every call.

    Args:
        kind: one of `KINDS`.
        number: from 0.
        which: name of the set (`seeds.SETS`).
    """
    rng = seeds.rng(which, f"agents {kind}", number)
    goods = shop(rng)
    conversations = tuple(KINDS[kind](rng, goods, Tools(goods.articles, rng.random())))
    steps = [
        [Request(i, step) for step in range(len(one.episode.steps))]
        for i, one in enumerate(conversations)
    ]
    turns = zip_longest(*steps) if kind in _IN_TURNS else zip(*[_joined(steps)], strict=True)
    requests = tuple(it for turn in turns for it in turn if it is not None)
    return Trace(kind, number, goods, conversations, requests)


def _single(rng: Random, goods: Shop, tools: Tools) -> Iterator[Conversation]:
    found = episode(rng, goods, tools)
    yield Conversation(react.instructions(), f"{_session(rng, tools)}{_asked(found)}", found)


def _users(rng: Random, goods: Shop, tools: Tools) -> Iterator[Conversation]:
    for _ in range(USERS):
        found = episode(rng, _popular(rng, goods), tools, items=2)
        yield Conversation(react.instructions(), f"{_session(rng, tools)}{_asked(found)}", found)


def _clock(rng: Random, goods: Shop, tools: Tools) -> Iterator[Conversation]:
    for one in _users(rng, goods, tools):
        yield Conversation(f"{_session(rng, tools)}{one.system}", _asked(one.episode), one.episode)


def _quotes(rng: Random, goods: Shop, tools: Tools) -> Iterator[Conversation]:
    notes: list[str] = []
    for role in ROLES:
        found = episode(rng, goods, tools, items=2)
        system = f"You work for a {role}.\n{react.instructions()}"
        quoted = "".join(
            f"Note {rng.randrange(10**4)} at {tools.moment()}: {note}\n" for note in notes
        )
        yield Conversation(system, f"{quoted}{_asked(found)}", found)
        searches = [step for step in found.steps if step.tool == SEARCH]
        notes += [json.dumps(json.loads(it.observation)["results"][0]) for it in searches]


KINDS: Mapping[str, Callable[[Random, Shop, Tools], Iterator[Conversation]]] = MappingProxyType(
    {"single": _single, "users": _users, "clock": _clock, "quotes": _quotes}
)
_IN_TURNS = ("users", "clock")
_POPULAR = 4
"""Articles that the users of one trace ask about."""


def _popular(rng: Random, goods: Shop) -> Shop:
    titles = sorted(goods.prices)[:_POPULAR]
    return Shop(goods.articles, {it: goods.prices[it] for it in titles})


def _session(rng: Random, tools: Tools) -> str:
    return f"Session {rng.getrandbits(64):016x}, {tools.moment()}.\n"


def _asked(found: Episode) -> str:
    return f"Question: {found.question}"


def _joined(steps: Sequence[Sequence[Request]]) -> list[Request]:
    return [request for one in steps for request in one]


class Writer:
    """Prompts as token ids, in the chat format of a tokenizer that has one.

    The history is the beginning of the answer, so that it only grows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat = getattr(tokenizer, "chat_template", None) is not None

    def measure(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer(text, add_special_tokens=False).input_ids)

    def request(self, trace: Trace, request: Request) -> list[int]:
        """A step behind the right history."""
        conversation = trace.conversations[request.conversation]
        return self.prompt(conversation, conversation.episode.history(request.step))

    def prompt(self, conversation: Conversation, history: str) -> list[int]:
        """A conversation and any history."""
        parts = {"system": conversation.system, "user": conversation.user}
        if self.chat:
            messages = [{"role": role, "content": content} for role, content in parts.items()]
            begin = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        else:
            begin = f"{conversation.system}\n{conversation.user}\n"
        return list(self._tokenizer(begin + history, add_special_tokens=False).input_ids)
