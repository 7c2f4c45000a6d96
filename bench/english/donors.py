# SPDX-License-Identifier: Apache-2.0
"""In which prompts the documents were computed before they are reused.

alone      each document by itself, with nothing in front
siblings   each behind two documents of the same set, which the prompt asked about does not have
reversed   all in one other prompt, in the opposite order
stream     in three earlier prompts with other questions, which retrieved some of the documents in
           other orders; every document was retrieved once or more
knowledge  as `vllm_segreuse/features/knowledge` ingests a base of the set, whatever it does

Siblings are not among the prompt's own documents: there they would be donors, too, computed behind
less context than they are meant to have. All of these prompts are computed in full. A prompt of a
stream may begin with the documents that the prompt asked about begins with: vLLM's own prefix cache
finds these, and they do not count as reused.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import MappingProxyType

from bench.english.prompts import NOTES, Prompts
from bench.english.tasks.base import Example

KNOWLEDGE = "knowledge"
STREAM_PROMPTS = 3
END = (
    "This is the end of the notes. Please file them under the right heading, do not answer any "
    "question about them yet, and wait for further instructions from the team."
)
"""More than one KV block in most tokenizers: every block of the document before it is complete."""
_QUESTIONS = (
    "Which of these documents is the longest? Give its first three words, and nothing else please.",
    "Summarise the documents in one sentence of at most twenty words, without any names in it.",
    "List what these documents have in common, in a few words, and do not quote any numbers.",
)


def _alone(example: Example, prompts: Prompts, rng: Random) -> list[list[int]]:
    return [prompts.alone(document, f" {END}") for document in example.documents]


def _siblings(example: Example, prompts: Prompts, rng: Random) -> list[list[int]]:
    # The same two for all: vLLM's own prefix cache computes them once.
    return [
        prompts.prompt([*example.others, document], END, NOTES) for document in example.documents
    ]


def _reversed(example: Example, prompts: Prompts, rng: Random) -> list[list[int]]:
    return [prompts.prompt(reversed(example.documents), END, NOTES)]


def _stream(example: Example, prompts: Prompts, rng: Random) -> list[list[int]]:
    number = len(example.documents)
    retrieved = [set(rng.sample(range(number), (number + 1) // 2)) for _ in range(STREAM_PROMPTS)]
    for missing in set(range(number)).difference(*retrieved):
        rng.choice(retrieved).add(missing)
    found = []
    for question, some in zip(_QUESTIONS, retrieved, strict=True):
        order = [example.documents[i] for i in sorted(some)]
        order += rng.sample(example.others, rng.randint(0, len(example.others)))
        rng.shuffle(order)
        found.append(prompts.prompt(order, question))
    return found


Donors = Callable[[Example, Prompts, Random], list[list[int]]]
PROMPTS: MappingProxyType[str, Donors] = MappingProxyType(
    {"alone": _alone, "siblings": _siblings, "reversed": _reversed, "stream": _stream}
)
"""How the prompts are made, as token ids, by kind of donors. `knowledge` has none."""

DONORS = (*PROMPTS, KNOWLEDGE)
