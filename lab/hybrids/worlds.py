# SPDX-License-Identifier: Apache-2.0
"""What is asked: documents in the lab's language, siblings of other worlds, and questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.quality import language, seeds
from bench.quality.tasks import base, documents, retrieval, variables
from bench.quality.tasks.base import Names, Question, Statement, Thread

DOCUMENTS = 8
WORDS = 72
"""Of a document. With its questions a prompt has about as many words as the longest rows that the
hybrid was trained on."""
SIBLINGS = 2
EACH = 2
"""Questions of a kind, at most, that a world is asked."""
KINDS = ("hop 0", "hop 1", "one hop", "two hops", "needles")


@dataclass(frozen=True)
class World:
    """A prompt, and the prompts in which its documents were read before; all as token ids.

    Attributes:
        head: what stands in front of the documents.
        documents: of the prompt.
        donor_head: what stood in front of them elsewhere.
        siblings: documents about other things, which stood between.
        questions: with their answers.
    """

    head: list[int]
    documents: list[list[int]]
    donor_head: list[int]
    siblings: list[list[int]]
    questions: list[Question]


def draw(number: int, which: str) -> World:
    """World `number` of a set of seeds: statements of a chain stand in different documents."""
    rng = seeds.rng(which, "hybrids", number)
    names = Names(rng)
    world = base.lay_out(rng, _threads(names, rng, 12, 8), [WORDS] * DOCUMENTS, apart=True)
    others = base.lay_out(rng, _threads(names, rng, 4, 3), [WORDS] * SIBLINGS, apart=True)
    return World(
        _head(rng),
        [_encoded(one) for one in world.documents],
        _head(rng),
        [_encoded(one) for one in others.documents],
        _chosen(rng, world.questions),
    )


def _threads(names: Names, rng: Random, chains: int, others: int) -> list[Thread]:
    threads = [variables.chain(names, rng, 1) for _ in range(chains)]
    threads += [documents.bridge(names, rng) for _ in range(others)]
    threads += [retrieval.needles(names, rng, 1, 1) for _ in range(others)]
    rng.shuffle(threads)
    return threads


def _chosen(rng: Random, questions: Sequence[Question]) -> list[Question]:
    """Some of each kind."""
    mixed = rng.sample(questions, len(questions))
    of_kind = ([one for one in mixed if one.kind == kind][:EACH] for kind in KINDS)
    return [one for some in of_kind for one in some]


def _head(rng: Random) -> list[int]:
    return language.encode(("<bos>", *base.instruction(rng, 4, 12)))


def _encoded(document: Sequence[Statement]) -> list[int]:
    return language.encode(word for statement in document for word in statement.words)
