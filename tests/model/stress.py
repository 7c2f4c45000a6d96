# SPDX-License-Identifier: Apache-2.0
"""The stateful model and the simulation for as long as asked; `make stress`.

    python -m tests.model.stress --operations 1000000 --seeds 10000 --log stress.log
    python -m tests.model.stress --minutes 30

An operation is one event of an engine: an arrival, a step that leaves or comes back, an abort, a
reset and the like. All invariants are checked after each. Exit status 1 at the first finding.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import vllm
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import vllm_segreuse
from tests.model import machine
from tests.model.simulation import REQUESTS, SimulationError, simulate
from tests.model.world import Setup, World

_ENGINES_PER_BATCH = 100
_SEEDS_PER_LINE = 100


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    options = _parse(arguments)
    logging.disable(logging.WARNING)  # every engine announces itself; errors are to be seen
    World(Setup())  # what is loaded on first use
    gc.collect()
    gc.freeze()  # the modules of torch and vLLM: a hundred times what an engine here makes
    log = options.log.open("w") if options.log else None

    def say(line: str) -> None:
        print(line, flush=True)
        if log is not None:
            print(line, file=log, flush=True)

    say(
        f"vllm-segreuse {vllm_segreuse.__version__}, vLLM {vllm.__version__}, {platform.platform()}"
    )
    say(
        f"python -m tests.model.stress {' '.join(sys.argv[1:] if arguments is None else arguments)}"
    )
    began = time.monotonic()
    half, end = (began + share * 60 * options.minutes for share in (0.5, 1.0))
    findings = _model(options.operations, half, options.first_seed, say)
    findings += _simulation(options.seeds, end, options.first_seed, options.requests, say)
    say(f"findings: {findings}; {time.monotonic() - began:.0f} s")
    if log is not None:
        log.close()
    return int(findings > 0)


def _model(operations: float, until: float, first: int, say: Callable[[str], None]) -> int:
    """Batches of engines until enough events happened; the number of findings (0 or 1)."""
    totals = machine.totals
    totals.clear()
    batch = first
    while totals["events"] < operations and time.monotonic() < until:
        try:
            run_state_machine_as_test(
                seed(batch)(type("Machine", (machine.Machine,), {})),
                settings=settings(
                    max_examples=_ENGINES_PER_BATCH,
                    stateful_step_count=50,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Exception as error:
            say(f"stateful model: FAILED in batch {batch}: {error}")
            say("".join(traceback.format_exception(error)))
            return 1
        batch += 1
        if (batch - first) % 10 == 0:
            say(f"stateful model: {totals['events']} operations in {totals['engines']} engines")
    say(f"stateful model: batches {first} to {batch - 1}, {totals['events']} operations")
    say(f"stateful model: {dict(totals)}")
    return 0


def _simulation(
    seeds: float, until: float, first: int, requests: int, say: Callable[[str], None]
) -> int:
    """Seeds from `first` on; the number of findings."""
    totals: Counter[str] = Counter()
    findings, number = 0, first
    while number - first < seeds and time.monotonic() < until:
        try:
            totals += simulate(number, requests).counts
        except SimulationError as error:
            findings += 1
            say(f"simulation: {error}")
            say("".join(traceback.format_exception(error)))
        number += 1
        if (number - first) % _SEEDS_PER_LINE == 0:
            say(f"simulation: {number - first} seeds, {totals['events']} operations")
    say(f"simulation: seeds {first} to {number - 1} of {requests} requests: {dict(totals)}")
    return findings


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make stress ARGS=", description=__doc__.split("\n")[0])
    parser.add_argument("--operations", type=int, help="of the stateful model")
    parser.add_argument("--seeds", type=int, help="of the simulation")
    parser.add_argument("--minutes", type=float, help="half for each; ends sooner at the counts")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per seed (%(default)s)")
    parser.add_argument("--log", type=Path, help="file to write what is printed to, as well")
    options = parser.parse_args(arguments)
    if options.operations is None and options.seeds is None:
        bounded = options.minutes is not None
        options.operations, options.seeds = (math.inf, math.inf) if bounded else (100_000, 500)
    options.operations = options.operations or 0
    options.seeds = options.seeds or 0
    options.minutes = math.inf if options.minutes is None else options.minutes
    return options


if __name__ == "__main__":
    sys.exit(main())
