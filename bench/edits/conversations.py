# SPDX-License-Identifier: Apache-2.0
"""Conversations of an agent with tools, as lists of OpenAI's messages.

The agent is asked to look some articles up, and calls its search once for each: a loop of steps
with a thought, a call and a result. Then it is asked for prices that only the results say, one
question a turn. Its answers are begun for it: small models find prices, but not always words.
Thoughts are sentences of documentation, about as long as those of small models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Any

from bench.agents.episodes import shop
from bench.english.text import filler
from examples.agents.tools import SCHEMAS, Tools

Message = Mapping[str, Any]
Measure = Callable[[str], int]

LATER_TURNS = 6
RESULTS = 5
"""Articles in a result of the search: about 550 tokens."""
THOUGHT_TOKENS = 64
SYSTEM = (
    "You help the staff of a shop. Look articles up with your tools, and answer from what they "
    "say. Today is {date}."
)


@dataclass(frozen=True)
class Question:
    """A turn of the user that needs no tool.

    Attributes:
        text: what is asked.
        begun: how the answer begins, up to the price, so that its first token is one of the price.
        right: how it has to go on.
        thought: of the assistant, in front of the answer.
    """

    text: str
    begun: str
    right: str
    thought: str

    @property
    def answer(self) -> str:
        """All of it."""
        return f"{self.begun}{self.right} euros."


@dataclass(frozen=True)
class Conversation:
    """A tool loop, and the questions behind it.

    Attributes:
        number: which it is.
        tools: as OpenAI describes functions.
        loop: messages up to the end of the loop, the system's first.
        questions: the one at the edit, those of later turns, and one to retry.
    """

    number: int
    tools: tuple[Mapping[str, Any], ...]
    loop: tuple[Message, ...]
    questions: tuple[Question, ...]

    def asked(self, turn: int) -> list[Message]:
        """Messages of a turn: all questions before it are answered rightly."""
        messages = [*self.loop]
        for question in self.questions[:turn]:
            messages += [user(question.text), assistant(question.thought, question.answer)]
        return [*messages, user(self.questions[turn].text)]


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(thought: str, text: str, call: Mapping[str, Any] | None = None) -> Message:
    """A message of the assistant."""
    calls = [] if call is None else [{"type": "function", "function": call}]
    return {
        "role": "assistant",
        "reasoning_content": thought,
        "content": text,
        "tool_calls": calls,
    }


def draw(rng: Random, number: int, steps: int, measure: Measure) -> Conversation:
    """A conversation.

    Args:
        rng: source of all choices.
        number: which it is.
        steps: of the tool loop.
        measure: tokens of a text.
    """
    goods = shop(rng)
    tools = Tools(goods.articles, rng.random(), results=RESULTS)
    titles = rng.sample(sorted(goods.prices), steps)

    def thought() -> str:
        return " ".join(filler(rng, THOUGHT_TOKENS, measure))

    day = f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    system = {"role": "system", "content": SYSTEM.format(date=day)}
    loop = [system, user(f"Look these articles up: {', '.join(titles)}.")]
    for title in titles:
        call = {"name": "search", "arguments": {"query": title}}
        result = tools.call("search", title)
        loop += [assistant(thought(), "", call), {"role": "tool", "content": result}]
    loop.append(assistant(thought(), "I have looked them up. What do you want to know?"))
    # Articles of the later half: edits cut results of the earlier one.
    known = titles[len(titles) // 2 :]
    rng.shuffle(known)
    chosen = list(islice(cycle(known), LATER_TURNS + 2))
    if chosen[-1] == chosen[0]:  # the one that takes back the other
        chosen[-1] = known[1]
    questions = [
        Question(
            f"How many euros does the {title} cost?",
            f"The {title} costs ",
            str(goods.prices[title]),
            thought(),
        )
        for title in chosen
    ]
    return Conversation(number, schemas(rng), tuple(loop), tuple(questions))


def schemas(rng: Random) -> tuple[Mapping[str, Any], ...]:
    """Two tools that are called, among some that are not."""
    others = [
        {
            "name": f"{verb}_{thing}",
            "description": f"{verb.capitalize()}s one {thing} of the shop, by its number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": f"of the {thing}"}},
                "required": ["number"],
            },
        }
        for verb in ("show", "cancel", "archive")
        for thing in ("order", "invoice", "customer", "delivery")
    ]
    return (*SCHEMAS, *rng.sample(others, 6))


def as_json(result: Message) -> Mapping[str, Any]:
    """What a tool has answered."""
    return dict(json.loads(result["content"]))


def results(messages: Sequence[Message]) -> list[int]:
    """Where the results of tools are."""
    return [i for i, message in enumerate(messages) if message["role"] == "tool"]
