# SPDX-License-Identifier: Apache-2.0
"""Tasks by name, and how one of their examples is drawn."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import MappingProxyType

from bench.english.tasks import conversations, duplicates, questions, ruler
from bench.english.tasks.base import Example, Maker, layout
from bench.english.text import Measure

RULER = MappingProxyType(
    {
        "needles": ruler.needles,
        "variables": ruler.variables,
        "common": ruler.common,
        "frequent": ruler.frequent,
    }
)
LENGTHS = MappingProxyType({"1k": 1024, "2k": 2048, "4k": 4096})
"""Of RULER's tasks, in turn: tokens of all documents together."""

LONG = MappingProxyType(
    {
        "multi-value": ruler.values,
        "multi-query": ruler.needles,
        "tracking": ruler.variables,
    }
)
LONG_LENGTHS = MappingProxyType({"4k": 4096, "8k": 8192})
"""The same of tasks that are asked by name only, since each example takes a minute or more."""

OTHER: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "one-hop": questions.one_hop,
        "two-hop": questions.two_hops,
        "pronoun": questions.pronoun,
        "contracts": duplicates.contracts,
        "products": duplicates.products,
        "logs": duplicates.logs,
        "chat": conversations.chat,
        "agents": conversations.agents,
        "react": conversations.react,
    }
)
USUAL = (*RULER, *OTHER)
"""What is asked where nothing is named."""
TASKS: MappingProxyType[str, Maker] = MappingProxyType({**RULER, **OTHER, **LONG})


def draw(task: str, number: int, rng: Random, measure: Measure) -> Example:
    """One example of a task: RULER's tasks have each of their lengths in turn.

    Args:
        task: one of `TASKS`.
        number: of the example.
        rng: source of all choices.
        measure: tokens of a text, of the model that is asked.

    Raises:
        KeyError: there is no such task.
    """
    if task in OTHER:
        return TASKS[task](rng, layout(rng), measure, "")
    lengths = LENGTHS if task in RULER else LONG_LENGTHS
    kind = list(lengths)[number % len(lengths)]
    return replace(TASKS[task](rng, layout(rng, lengths[kind]), measure, kind), task=task)
