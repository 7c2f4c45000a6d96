# SPDX-License-Identifier: Apache-2.0
"""Tasks, and how one becomes a prompt: prefix, documents that are reused, suffix with the question.

As in SparseX's appendix B, documents are first computed in other prompts, and then reused in the
one that is asked about. In each of these `contexts` a document that has nothing to do with the
question stands first, and the reused documents follow in the opposite of their later order: none of
them is preceded by what will precede it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from statistics import fmean

from bench.quality.tasks import agents, chat, counting, documents, retrieval, variables
from bench.quality.tasks.base import Names, Question, Thread, World, instruction, lay_out

RULER = ("mq-niah", "vt", "cwe", "fwe")
FREQUENT_SHARE = 0.6
FREQUENCIES = [1 / rank**2 for rank in range(1, 10)]
"""RULER's law of frequent words: Zipf with exponent 2. As there they are most of the text."""


@dataclass(frozen=True)
class Example:
    """One question about documents.

    Attributes:
        task: name of the task.
        kind: what a table may split the task by, such as `hop 2`.
        prefix: words in front of the documents.
        documents: words of each document.
        suffix: words behind them, the question last.
        answer: the right answer, closed by a full stop.
        contexts: prompts in which the documents were computed before.
        new_between: words of new text between documents.
    """

    task: str
    kind: str
    prefix: tuple[str, ...]
    documents: tuple[tuple[str, ...], ...]
    suffix: tuple[str, ...]
    answer: tuple[str, ...]
    contexts: tuple[tuple[str, ...], ...]
    new_between: tuple[tuple[str, ...], ...] = ()

    @property
    def prompt(self) -> list[str]:
        """All words."""
        words = list(self.prefix)
        for index, document in enumerate(self.documents):
            words += document
            if index < len(self.new_between):
                words += self.new_between[index]
        return [*words, *self.suffix]

    def score(self, said: list[str]) -> float:
        """RULER's measure: the share of the answer that was said.

        Words behind the first full stop do not count, nor do names that the question gives.
        """
        until = said.index(".") if "." in said else len(said)
        expected = [word for word in self.answer if word not in (",", ".")]
        if self.kind in ("common", "frequent"):
            return len(set(expected) & set(said[:until])) / len(expected)
        # Values are asked for by name: the right one at the wrong place is wrong.
        given = [word for word in said[:until] if word != ","]
        right = [a == b for a, b in zip_longest(expected, given) if a and a not in self.suffix]
        return fmean(right)


def _unasked(threads: Sequence[Thread]) -> list[Thread]:
    """What the documents also say."""
    return [Thread(thread.statements, ()) for thread in threads]


def _needles(names: Names, rng: Random, _: int) -> list[Thread]:
    asked = retrieval.needles(names, rng, 4, at_once=4)
    return [asked, *_unasked([retrieval.needles(names, rng, 12, at_once=4)])]


def _variables(names: Names, rng: Random, _: int) -> list[Thread]:
    asked = variables.chain(names, rng, 3)
    asked = Thread(asked.statements, (asked.questions[rng.choice((1, 2, 3))],))
    others = [variables.chain(names, rng, 3) for _ in range(3)]
    return [asked, *_unasked(others)]


def _several_variables(names: Names, rng: Random, _: int) -> list[Thread]:
    chains = [variables.chain(names, rng, 3) for _ in range(4)]
    asked = Thread(chains[0].statements, (variables.at_once(chains, rng),))
    return [*_unasked(chains[1:]), asked]


def _common(names: Names, rng: Random, _: int) -> list[Thread]:
    return [counting.common(names, rng, words=4, times=10, rare=20)]


def _frequent(names: Names, rng: Random, tokens: int) -> list[Thread]:
    most = FREQUENT_SHARE * tokens / sum(FREQUENCIES)
    counts = [round(most * share) for share in FREQUENCIES]
    return [counting.frequent(names, rng, counts, asked=3)]


def _two_hops(names: Names, rng: Random, _: int) -> list[Thread]:
    asked = documents.bridge(names, rng)
    others = [documents.bridge(names, rng) for _ in range(9)]
    return [Thread(asked.statements, asked.questions[:1]), *_unasked(others)]


def _memory(names: Names, rng: Random, _: int) -> list[Thread]:
    asked = chat.memory(names, rng, rng.choice((1, 2)))
    others = [chat.memory(names, rng, rng.randint(0, 2)) for _ in range(9)]
    return [asked, *_unasked(others)]


def _debate(names: Names, rng: Random, _: int) -> list[Thread]:
    said = agents.debate(names, rng, 12)
    return [Thread(said.statements, (rng.choice(said.questions),))]


TASKS: dict[str, Callable[[Names, Random, int], list[Thread]]] = {
    "mq-niah": _needles,
    "vt": _variables,
    "mq-vt": _several_variables,
    "cwe": _common,
    "fwe": _frequent,
    "two-hop qa": _two_hops,
    "chat memory": _memory,
    "debate": _debate,
}


def example(
    task: str,
    rng: Random,
    tokens: int = 2048,
    number: int = 4,
    question_first: bool = False,
    interleaved: float = 0.0,
) -> Example:
    """Draw one example.

    Args:
        task: one of `TASKS`.
        rng: source of all choices.
        tokens: of the prompt, about.
        number: of documents.
        question_first: the question also stands in front of the documents.
        interleaved: chance of new text between two documents.

    Raises:
        KeyError: unknown task.
    """
    world, question = _world(task, rng, tokens, number)
    prefix = ("<bos>", *instruction(rng, 8, 14))
    if question_first:
        prefix += question.words
    texts = _texts(world)
    between = tuple(
        instruction(rng, 4, 24) if rng.random() < interleaved else () for _ in texts[1:]
    )
    suffix = (*instruction(rng, 1, 8), *question.words)
    return Example(
        task,
        question.kind,
        prefix,
        texts,
        suffix,
        question.answer,
        _contexts(task, rng, tokens, texts),
        between,
    )


def _world(task: str, rng: Random, tokens: int, number: int) -> tuple[World, Question]:
    sizes = [(tokens - 40) // number] * number
    for _ in range(100):
        threads = TASKS[task](Names(rng), rng, tokens)
        world = lay_out(rng, threads, sizes, apart=task in ("vt", "mq-vt", "debate"))
        if world.questions:
            return world, world.questions[0]
    raise ValueError(f"{task} does not fit into {number} documents of {sizes[0]} words")


def _texts(world: World) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(word for statement in document for word in statement.words)
        for document in world.documents
    )


def _contexts(
    task: str, rng: Random, tokens: int, texts: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], ...]:
    """Two prompts, each with every other document in reverse, behind one of another example."""
    contexts = []
    for start in (0, 1):
        stranger, _ = _world(task, rng, tokens, len(texts))
        words = ["<bos>", *instruction(rng, 8, 14), *_texts(stranger)[0]]
        for text in reversed(texts[start::2]):
            words += text
        if len(texts[start::2]):
            contexts.append((*words, *instruction(rng, 4, 8)))
    return tuple(contexts)
