# SPDX-License-Identifier: Apache-2.0
"""Multi-document question answering in two hops: the place of whoever leads something."""

from __future__ import annotations

from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Statement, Thread, lookup


def bridge(names: Names, rng: Random) -> Thread:
    """`lead k12 is k40 .` and `place k40 is n33 .`, in either order, in different documents."""
    group, leader = names.take(language.KEYS, 2)
    place = rng.choice(language.NUMBERS)
    statements = [
        Statement(("lead", group, "is", leader, ".")),
        Statement(("place", leader, "is", place, ".")),
    ]
    rng.shuffle(statements)
    return Thread(
        tuple(statements),
        (
            lookup("two hops", ["place", "lead"], [(group, (place,))]),
            lookup("one hop", ["place"], [(leader, (place,))]),
            lookup("one hop", ["lead"], [(group, (leader,))]),
        ),
    )
