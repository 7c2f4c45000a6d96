# SPDX-License-Identifier: Apache-2.0
"""RULER's variable tracking: chains of assignments, each hop in another document.

`let v12 = n05 .`, further on `let v30 = v12 .`: what is v30? RULER asks for all variables that hold
a value; here the value of one is asked, so that the number of hops is known, or (`mq-vt`) the
values of several at once, so that what the later answers rest on is not yet looked up when the
prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Question, Statement, Thread, lookup


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


def at_once(chains: Sequence[Thread], rng: Random) -> Question:
    """The value of one variable of each chain."""
    asked = [rng.choice(chain.questions) for chain in chains]
    return lookup("several", ["value"], [(one.words[-1], one.answer[:-1]) for one in asked])


def several(chains: Sequence[Thread], rng: Random) -> Thread:
    """Chains as one thread, their statements mixed but each chain's in order; asked for at once."""
    turns = [number for number, chain in enumerate(chains) for _ in chain.statements]
    rng.shuffle(turns)
    left = [iter(chain.statements) for chain in chains]
    return Thread(tuple(next(left[number]) for number in turns), (at_once(chains, rng),))


def dangling(names: Names, rng: Random) -> Thread:
    """An assignment from a variable that is defined nowhere: its value is `unknown`."""
    target, source = names.take(language.VARIABLES, 2)
    question = lookup("unknown", ["value"], [(target, ("unknown",))])
    return Thread((Statement(("let", target, "=", source, ".")),), (question,))
