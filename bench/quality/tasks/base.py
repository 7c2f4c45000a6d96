# SPDX-License-Identifier: Apache-2.0
"""What a task is made of: threads of statements, laid out over documents, and questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from bench.quality import language


@dataclass(frozen=True)
class Statement:
    """One sentence.

    Attributes:
        words: its words.
        predictable: indices of words that follow from what was said before (training learns them).
    """

    words: tuple[str, ...]
    predictable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Question:
    """A question and its one right answer.

    Attributes:
        kind: what a table calls it, such as `hop 2`.
        words: the question, from `?` to the word that the answer follows.
        answer: the answer, closed by a full stop.
    """

    kind: str
    words: tuple[str, ...]
    answer: tuple[str, ...]


@dataclass(frozen=True)
class Thread:
    """Statements that belong together, in the order in which they are said."""

    statements: tuple[Statement, ...]
    questions: tuple[Question, ...]


@dataclass
class Names:
    """Names of one world, each given out once."""

    rng: Random
    _left: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    def take(self, pool: tuple[str, ...], count: int = 1) -> list[str]:
        """`count` names of a class that nobody else in this world bears.

        Raises:
            IndexError: the class is exhausted.
        """
        if pool not in self._left:
            self._left[pool] = self.rng.sample(pool, len(pool))
        return [self._left[pool].pop() for _ in range(count)]

    def left(self, pool: tuple[str, ...]) -> int:
        """How many names of a class are still to be had."""
        return len(self._left.get(pool, pool))


@dataclass(frozen=True)
class World:
    """A text in documents, and what may be asked about it."""

    documents: tuple[tuple[Statement, ...], ...]
    questions: tuple[Question, ...]


ThreadMaker = Callable[[Names, Random], Thread]


def lookup(
    kind: str, relation: Sequence[str], pairs: Sequence[tuple[str, Sequence[str]]]
) -> Question:
    """`? RELATION a , b : a` -> `A , b B .`: the values of one or more names.

    The question closes with the first name, so that the first word of the answer is a value.
    """
    asked = " , ".join(name for name, _ in pairs).split()
    told = [word for name, value in pairs for word in (",", name, *value)][2:]
    return Question(kind, ("?", *relation, *asked, ":", pairs[0][0]), (*told, "."))


def noise(rng: Random, count: int) -> Statement:
    """Words that mean nothing."""
    return Statement(tuple(rng.choices(language.NOISE, k=count)))


def instruction(rng: Random, low: int, high: int) -> tuple[str, ...]:
    """An instruction's words, which mean nothing either, but are not the documents' noise."""
    return tuple(rng.choices(language.INSTRUCTION, k=rng.randint(low, high)))


def lay_out(
    rng: Random, threads: Sequence[Thread], sizes: Sequence[int], apart: bool = False
) -> World:
    """Spread threads over documents of given sizes, in the order of each, filled up with noise.

    Args:
        rng: source of all choices.
        threads: what the documents say. A thread that does not fit is left out, questions and all.
        sizes: words of each document.
        apart: a thread's statements go to different documents, as far as there are enough.
    """
    room = [size - 1 for size in sizes]
    placed: list[list[tuple[float, Statement]]] = [[] for _ in sizes]
    questions: list[Question] = []
    for thread in threads:
        where = _places(rng, len(thread.statements), len(sizes), apart)
        need = [0] * len(sizes)
        for (document, _), statement in zip(where, thread.statements, strict=True):
            need[document] += len(statement.words)
        if any(wanted > free for wanted, free in zip(need, room, strict=True)):
            continue
        room = [free - wanted for free, wanted in zip(room, need, strict=True)]
        for (document, height), statement in zip(where, thread.statements, strict=True):
            placed[document].append((height, statement))
        questions += thread.questions
    documents = []
    for free, statements in zip(room, placed, strict=True):
        statements.sort(key=lambda entry: entry[0])
        cuts = [0, *sorted(rng.randint(0, free) for _ in statements), free]
        text = [Statement(("<doc>",))]
        for index, gap in enumerate(b - a for a, b in pairwise(cuts)):
            text.append(noise(rng, gap))
            if index < len(statements):
                text.append(statements[index][1])
        documents.append(tuple(text))
    return World(tuple(documents), tuple(questions))


def _places(rng: Random, count: int, documents: int, apart: bool) -> list[tuple[int, float]]:
    """For each statement of a thread, in order: its document, and how far down it stands."""
    if apart and count <= documents:
        chosen = sorted(rng.sample(range(documents), count))
        return [(document, rng.random()) for document in chosen]
    heights = sorted(rng.random() * documents for _ in range(count))
    return [(min(int(height), documents - 1), height) for height in heights]
