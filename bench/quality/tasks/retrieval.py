# SPDX-License-Identifier: Apache-2.0
"""RULER's multi-query needle in a haystack: several of the hidden numbers are asked for at once."""

from __future__ import annotations

from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Statement, Thread, lookup

Needle = tuple[str, tuple[str, str]]


def needle(names: Names, rng: Random) -> tuple[Statement, Needle]:
    """`needle number of k12 is n05 n33 .`"""
    (key,) = names.take(language.KEYS)
    value = (rng.choice(language.NUMBERS), rng.choice(language.NUMBERS))
    return Statement(("needle", "number", "of", key, "is", *value, ".")), (key, value)


def needles(names: Names, rng: Random, count: int, at_once: int) -> Thread:
    """`count` needles, each hidden anywhere, asked for `at_once` at a time."""
    statements, facts = zip(*(needle(names, rng) for _ in range(count)), strict=True)
    asked = rng.sample(facts, count)
    questions = tuple(
        lookup("needles", ["number"], asked[start : start + at_once])
        for start in range(0, count, at_once)
    )
    return Thread(statements, questions)
