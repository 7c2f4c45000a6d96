# SPDX-License-Identifier: Apache-2.0
"""RULER's variable tracking: chains of assignments, each hop in another document.

`let v12 = n05 .`, further on `let v30 = v12 .`: what is v30? RULER asks for all variables that hold
a value; here one variable's value is asked, so that the number of hops is known for each answer.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Statement, Thread, lookup


def chain(names: Names, rng: Random, hops: int, hint_rate: float = 0.0) -> Thread:
    """A value, and `hops` assignments that hand it on.

    Args:
        names: of the world.
        rng: source of choices.
        hops: assignments behind the first.
        hint_rate: share of the assignments that state the value they hand on (training only).
    """
    variables = names.take(language.VARIABLES, hops + 1)
    value = rng.choice(language.NUMBERS)
    statements = [Statement(("let", variables[0], "=", value, "."))]
    for source, target in pairwise(variables):
        if rng.random() < hint_rate:
            statements.append(Statement(("let", target, "=", source, value, "."), (4,)))
        else:
            statements.append(Statement(("let", target, "=", source, ".")))
    asked = tuple(
        lookup(f"hop {hop}", ["value"], [(name, (value,))]) for hop, name in enumerate(variables)
    )
    return Thread(tuple(statements), asked)


def dangling(names: Names, rng: Random) -> Thread:
    """An assignment from a variable that is defined nowhere: its value is `unknown`."""
    target, source = names.take(language.VARIABLES, 2)
    question = lookup("unknown", ["value"], [(target, ("unknown",))])
    return Thread((Statement(("let", target, "=", source, ".")),), (question,))
