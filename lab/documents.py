# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.documents FOLDER`: questions about documents in the lab's language, as JSON lines.

What `recipes/kvlink` trains the lab's model on: worlds of the quality tasks, all that is known of
each asked at once. `qa.jsonl` is for documents computed alone, `plain-qa.jsonl` has the same as
plain context, and `text.jsonl` says everything twice: what the first half says is known in the
second, which is what compression is learnt from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from bench.quality import language
from bench.quality.tasks import agents, base, chat, documents, retrieval, variables
from bench.quality.tasks.base import Names, Statement, Thread, World

SEED = 20260815
"""Of what is trained on; the examples of `bench.quality.seeds` have other ones."""

MOST_DOCUMENTS = 6
ASKED = 16
"""Most questions of a line."""


def world(rng: Random, chains: float) -> World:
    """Documents with much to ask about: 50 to 200 words, most of them in statements.

    Args:
        chains: chance that they hold nothing but chains of two or three hops.
    """
    number = rng.randint(2, MOST_DOCUMENTS)
    size = int(rng.uniform(50, 200)) // number
    budget = number * size * rng.uniform(0.5, 0.95)
    only_chains = chains > 0 and rng.random() < chains
    threads = _chains(rng, budget) if only_chains else _threads(rng, budget)
    return base.lay_out(rng, threads, [size] * number, apart=rng.random() < 0.8)


def _threads(rng: Random, budget: float) -> list[Thread]:
    names = Names(rng)
    makers = {
        "variables": lambda: variables.chain(names, rng, rng.randint(0, 3)),
        "needles": lambda: retrieval.needles(names, rng, rng.randint(1, 4), rng.randint(1, 4)),
        "bridge": lambda: documents.bridge(names, rng),
        "chat": lambda: chat.memory(names, rng, rng.randint(0, 2)),
        "agents": lambda: agents.debate(names, rng, rng.randint(2, 6)),
    }
    weights = {"variables": 6, "needles": 1.5, "bridge": 3, "chat": 2, "agents": 1}
    if rng.random() < 0.6:  # as the tasks are: one kind of statement
        kept = rng.choices(list(weights), list(weights.values()))[0]
        weights = {kept: 1}
    threads: list[Thread] = []
    used = 0
    while used < budget:
        if names.left(language.VARIABLES) < 8 or names.left(language.KEYS) < 8:
            break
        thread = makers[rng.choices(list(weights), list(weights.values()))[0]]()
        used += sum(len(statement.words) for statement in thread.statements)
        threads.append(thread)
    return threads


def _chains(rng: Random, budget: float) -> list[Thread]:
    names = Names(rng)
    threads: list[Thread] = []
    while budget > 0 and names.left(language.VARIABLES) >= 4:
        threads.append(variables.chain(names, rng, rng.randint(2, 3)))
        budget -= sum(len(statement.words) for statement in threads[-1].statements)
    return threads


def _text(statements: tuple[Statement, ...]) -> str:
    return " ".join(word for statement in statements for word in statement.words)


def asked(rng: Random, chains: float) -> dict[str, Any]:
    """A line of questions; later statements may overrule earlier ones, so documents are ordered."""
    while True:
        drawn = world(rng, chains)
        questions = rng.sample(drawn.questions, min(ASKED, len(drawn.questions)))
        if questions:
            break
    system = " ".join(("<bos>", *base.instruction(rng, 2, 14)))
    return {
        "system": system,
        "documents": [_text(document) for document in drawn.documents],
        "questions": [
            {
                "question": " ".join(
                    (*base.instruction(rng, 1, rng.choice((2, 2, 8))), *question.words)
                ),
                "answer": " ".join(question.answer),
            }
            for question in questions
        ],
        "ordered": True,
    }


def said_twice(rng: Random) -> dict[str, Any]:
    """A text of statements, and the same statements in another order."""
    threads = _threads(rng, rng.uniform(16, 80))
    statements = [statement for thread in threads for statement in thread.statements]
    again = rng.sample(statements, len(statements))
    return {"text": f"{_text(tuple(statements))} {_text(tuple(again))}"}


def _lines(kind: str, count: int, chains: float) -> Iterator[str]:
    for number in range(count):
        named = f"{kind} {chains:g}" if chains else kind
        rng = Random(f"{SEED} {named} {number}")
        made = said_twice(rng) if kind == "text" else asked(rng, chains)
        yield json.dumps(made) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for qa.jsonl, plain-qa.jsonl and text.jsonl")
    parser.add_argument("--lines", type=int, default=20000, help="of each file")
    parser.add_argument("--chains", type=float, default=0.0, help="share with chains only")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for kind in ("qa", "plain-qa", "text"):
        with (given.folder / f"{kind}.jsonl").open("w") as file:
            file.writelines(_lines(kind, given.lines, given.chains))


if __name__ == "__main__":
    main()
