# SPDX-License-Identifier: Apache-2.0
"""Long chat memory: a fact from many turns back, which later turns may have changed."""

from __future__ import annotations

from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Statement, Thread, lookup


def memory(names: Names, rng: Random, updates: int) -> Thread:
    """`<user> value k12 is n05 .`, then `updates` times `<user> value k12 now n09 .`"""
    (key,) = names.take(language.KEYS)
    values = rng.sample(language.NUMBERS, updates + 1)
    statements = [Statement(("<user>", "value", key, "is", values[0], "."))]
    statements += [Statement(("<user>", "value", key, "now", value, ".")) for value in values[1:]]
    question = lookup(f"{updates} updates", ["value", "now"], [(key, (values[-1],))])
    return Thread(tuple(statements), (question,))
