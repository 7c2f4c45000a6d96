# SPDX-License-Identifier: Apache-2.0
"""What a task draws: documents, a question about them, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.english.text import LONGEST_TOKENS, SHORTEST_TOKENS, Measure

COUNTS = (4, 6, 8, 12, 16, 24, 32)
"""Documents of a prompt."""
MOST_TOKENS = 2400
_SLACK_TOKENS = 14
"""Documents consist of whole sentences and come out a little shorter than they are laid out."""
OTHERS = 2
"""Documents of the set that a prompt does not have: those that its question did not retrieve."""
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Example:
    """One question about documents.

    Attributes:
        task: name of the task.
        kind: what a table may split the task by, such as `2k`.
        documents: text of each document of the prompt.
        others: further documents of the same set, which say nothing about the question.
        question: the question, with how to answer it.
        answers: parts of the right answer (`grading.score`).
        wrong: what a right answer does not contain.
        answer_tokens: the longest answer that is read.
    """

    task: str
    kind: str
    documents: tuple[str, ...]
    others: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    answer_tokens: int = ANSWER_TOKENS


@dataclass(frozen=True)
class Layout:
    """How many documents a prompt has, and how long each is to be."""

    count: int
    tokens: int

    @property
    def total(self) -> int:
        """Documents of the set: of the prompt, and others."""
        return self.count + OTHERS


Maker = Callable[[Random, Layout, Measure, str], Example]
"""Draws an example of a task: source of choices, layout, tokens of a text, name of its kind."""


def layout(rng: Random, total: int | None = None) -> Layout:
    """A number of documents and their length.

    Args:
        rng: source of choices.
        total: tokens of all documents together; None: any, up to `MOST_TOKENS`.
    """
    most = total or MOST_TOKENS
    shortest = SHORTEST_TOKENS + _SLACK_TOKENS
    least = 1 if total is None else total // LONGEST_TOKENS
    count = rng.choice([n for n in COUNTS if least <= n and n * shortest <= most])
    largest = min(LONGEST_TOKENS, most // count)
    return Layout(count, largest if total else rng.randint(shortest, largest))


def split(documents: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Documents of the prompt, and the last two as others."""
    return tuple(documents[:-OTHERS]), tuple(documents[-OTHERS:])
