# SPDX-License-Identifier: Apache-2.0
"""Two sets of examples: one to choose policies, thresholds and models by, one to report on.

A threshold that was chosen on some examples does better on them than on others. So what is chosen
(`focus`' shares, the hybrid's number of dense layers) is chosen on `tuning`, and every
figure that is published comes from `reporting`. Who has looked at figures of `reporting` and then
changes a policy needs a new seed for it.
"""

from __future__ import annotations

import os
from random import Random
from types import MappingProxyType

from bench.harness import BenchError

SETS = MappingProxyType({"tuning": "20260601", "reporting": "20261201"})
"""Seed by the name of the set."""


def chosen() -> str:
    """The set that a run asks: `BENCH_QUALITY_SEEDS`, or `reporting`.

    Raises:
        BenchError: there is no such set.
    """
    name = os.environ.get("BENCH_QUALITY_SEEDS") or "reporting"
    if name not in SETS:
        raise BenchError(f"BENCH_QUALITY_SEEDS={name}: there are only {' and '.join(SETS)}")
    return name


def rng(seeds: str, task: str, number: int) -> Random:
    """Source of all choices of one example: any part of a run can be repeated by itself."""
    return Random(f"{SETS[seeds]} {task} {number}")
