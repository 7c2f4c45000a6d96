# SPDX-License-Identifier: Apache-2.0
"""Whether a step or an answer is right, and how far texts are apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from bench.agents.episodes import FINAL, Step
from bench.english import grading
from examples.agents import react, tools


def step(said: str, label: Step) -> float:
    """1.0 if a step says what it should, else 0.0.

    A search is right if it has the words of the label, a calculation if its value is the same, and
    an answer if its first line has the number.

    Args:
        said: what the model wrote behind `Step.lead`.
        label: what is right.
    """
    if label.tool == FINAL:
        return answer(said, label.given)
    found = react.action(f"Action:{said}")
    return float(found is not None and found.tool == label.tool and _same(found.given, label))


def answer(said: str, right: str) -> float:
    """1.0 if the first line of a text has the number, else 0.0."""
    return grading.score(said.strip().partition("\n")[0], [right])


def _same(given: str, label: Step) -> bool:
    if label.tool == "search":
        return grading.score(given, label.given.split()) == 1.0
    try:
        return tools.calculate(given) == tools.calculate(label.given)
    except tools.ToolError:
        return False


def levenshtein(first: Sequence[object], second: Sequence[object]) -> float:
    """Insertions, deletions and replacements from one to the other, as a share of the longer one:
    0 for equal ones."""
    if not first and not second:
        return 0.0
    row = list(range(len(second) + 1))
    for i, mine in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, theirs in enumerate(second, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (mine != theirs))
    return row[-1] / max(len(first), len(second))


def spread(texts: Sequence[Sequence[object]]) -> float:
    """Mean distance of all pairs.

    Raises:
        ValueError: there is no pair.
    """
    pairs = list(combinations(texts, 2))
    if not pairs:
        raise ValueError("one text has no distance from another")
    return sum(levenshtein(*pair) for pair in pairs) / len(pairs)
