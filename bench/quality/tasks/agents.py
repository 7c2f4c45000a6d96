# SPDX-License-Identifier: Apache-2.0
"""Agents that quote each other: each reports values of the same variables, a moderator decides."""

from __future__ import annotations

from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Statement, Thread, lookup


def report(values: dict[str, str]) -> Statement:
    """`<agent> v12 is n05 , v30 is n07 .`: an agent's answer as another's prompt quotes it."""
    words = [word for name, value in values.items() for word in (",", name, "is", value)][1:]
    return Statement(("<agent>", *words, "."))


def debate(names: Names, rng: Random, variables: int) -> Thread:
    """Three agents, of whom two agree on each variable: what did most of them say?"""
    asked = names.take(language.VARIABLES, variables)
    said: list[dict[str, str]] = [{}, {}, {}]
    truth = {}
    for name in asked:
        right, wrong = rng.sample(language.NUMBERS, 2)
        truth[name] = right
        dissenter = rng.randrange(4)
        for agent in range(3):
            said[agent][name] = wrong if agent == dissenter else right
    for values in said:
        order = rng.sample(list(values), len(values))
        reordered = {name: values[name] for name in order}
        values.clear()
        values.update(reordered)
    questions = tuple(lookup("majority", ["vote"], [(name, (truth[name],))]) for name in asked)
    return Thread(tuple(report(values) for values in said), questions)
