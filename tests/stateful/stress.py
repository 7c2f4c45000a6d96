# SPDX-License-Identifier: Apache-2.0
"""The stateful model and the simulation for as long as asked; `make stress`.

    python -m tests.stateful.stress --operations 1000000 --seeds 10000 --json stress.json
    python -m tests.stateful.stress --minutes 30
    python -m tests.stateful.stress --world isolated --world drafts --engines 600

An operation is one event of an engine: an arrival, a step that leaves or comes back, an abort, a
reset and the like. All invariants are checked after each. Exit status 1 at the first finding.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from bench.harness import environment, write_json
from tests.stateful import machine
from tests.stateful.simulation import REQUESTS, SimulationError, simulate
from tests.stateful.world import Setup, World

_ENGINES_PER_BATCH = 100
_SEEDS_PER_LINE = 100


@dataclass
class Outcome:
    """Of one world of the model, or of the simulation.

    Attributes:
        runs: batches of the stateful model, or seeds of the simulation, as text.
        findings: what was printed for each.
        counts: what happened, by kind.
    """

    model: str
    runs: str
    findings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def row(self) -> dict[str, Any]:
        """For JSON."""
        findings = {"findings": len(self.findings), "first": "".join(self.findings[:1])}
        return {"model": self.model, "runs": self.runs, **findings, **self.counts}


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    options, where = _parse(arguments), environment()
    logging.disable(logging.WARNING)  # every engine announces itself; errors are to be seen
    World(Setup())  # what is loaded on first use
    gc.collect()
    gc.freeze()  # the modules of torch and vLLM: a hundred times what an engine here makes
    began = time.monotonic()
    half, end = (began + share * 60 * options.minutes for share in (0.5, 1.0))
    outcomes = [
        *_models(options, half),
        _simulation(options.seeds, end, options.first_seed, options.requests),
    ]
    findings = sum(len(outcome.findings) for outcome in outcomes)
    for outcome in outcomes:
        _say(f"{outcome.model}: {outcome.runs}: {dict(outcome.counts)}")
    seconds = round(time.monotonic() - began)
    _say(f"findings: {findings}; {seconds} s")
    if options.json is not None:
        operations = sum(outcome.counts["events"] for outcome in outcomes)
        requests = sum(outcome.counts["requests"] for outcome in outcomes)
        summary = {"findings": findings, "operations": operations, "requests": requests}
        rows = [outcome.row for outcome in outcomes]
        result = {"rows": rows, "summary": summary | {"seconds": seconds}}
        write_json(options.json, "stress", where, result)
    return int(findings > 0)


def _models(options: argparse.Namespace, until: float) -> Iterator[Outcome]:
    """One world after the other, each for as long as the others."""
    for left in range(len(options.world), 0, -1):
        now = time.monotonic()
        end = now + (until - now) / left
        world = options.world[-left]
        yield _model(world, options.operations, options.engines, end, options.first_seed)


def _model(world: str, operations: float, engines: float, until: float, first: int) -> Outcome:
    """Batches of engines until there were enough, or one fails."""
    totals, batch = machine.totals, first
    totals.clear()
    findings = []
    while (
        not findings
        and totals["events"] < operations
        and totals["engines"] < engines
        and time.monotonic() < until
    ):
        try:
            most = min(_ENGINES_PER_BATCH, engines - totals["engines"])
            run_state_machine_as_test(
                seed(batch)(machine.of_world(world)),
                settings=settings(
                    max_examples=int(most),
                    stateful_step_count=50,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Exception as error:
            findings.append(_found(f"world {world}: FAILED in batch {batch}: {error}", error))
        batch += 1
        if (batch - first) % 10 == 0:
            _say(f"world {world}: {totals['events']} operations in {totals['engines']} engines")
    return Outcome(f"world {world}", f"batches {first} to {batch - 1}", findings, Counter(totals))


def _simulation(seeds: float, until: float, first: int, requests: int) -> Outcome:
    """Seeds from `first` on."""
    totals: Counter[str] = Counter()
    findings, number = [], first
    while number - first < seeds and time.monotonic() < until:
        try:
            totals += simulate(number, requests).counts
        except SimulationError as error:
            findings.append(_found(f"simulation: {error}", error))
        number += 1
        if (number - first) % _SEEDS_PER_LINE == 0:
            _say(f"simulation: {number - first} seeds, {totals['events']} operations")
    runs = f"seeds {first} to {number - 1} of {requests} requests"
    return Outcome("simulation", runs, findings, totals)


def _found(what: str, error: Exception) -> str:
    """A finding, printed with where it is from."""
    _say(what)
    _say("".join(traceback.format_exception(error)))
    return what


def _say(line: str) -> None:
    print(line, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make stress ARGS=", description=__doc__.split("\n")[0])
    names = sorted(machine.WORLDS)
    parser.add_argument(
        "--world", action="append", choices=names, help="of the stateful model; any by default"
    )
    parser.add_argument("--operations", type=int, help="of the stateful model, in each world")
    parser.add_argument("--engines", type=int, help="of the stateful model, in each world")
    parser.add_argument("--seeds", type=int, help="of the simulation")
    parser.add_argument("--minutes", type=float, help="half for each; ends sooner at the counts")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per seed (%(default)s)")
    parser.add_argument("--json", type=Path, help="write what happened, with commit and machine")
    options = parser.parse_args(arguments)
    options.world = options.world or ["any"]
    if options.operations is None and options.engines is None and options.seeds is None:
        bounded = options.minutes is not None
        options.operations, options.seeds = (math.inf, math.inf) if bounded else (100_000, 500)
    if options.operations is None:
        options.operations = 0 if options.engines is None else math.inf
    options.engines = math.inf if options.engines is None else options.engines
    options.seeds = options.seeds or 0
    options.minutes = math.inf if options.minutes is None else options.minutes
    return options


if __name__ == "__main__":
    sys.exit(main())
