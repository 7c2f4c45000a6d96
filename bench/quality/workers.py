# SPDX-License-Identifier: Apache-2.0
"""Examples asked by several engines side by side, each on a core of its own.

The lab's model is too small for two threads to be much faster than one.
"""

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

from bench.quality.engine import Arm, Lab, Outcome, lab_engine, require_model
from bench.quality.tasks import Example, example

Asked = tuple[Example, dict[str, Outcome]]
Draw = dict[str, Any]
"""Arguments of `tasks.example`."""

_engine = ExitStack()
_lab: Lab


class Workers:
    """Asks examples in processes; use as a context manager."""

    def __init__(self) -> None:
        require_model()
        # Read by the processes to come when they load torch: their engines have a thread each.
        os.environ["OMP_NUM_THREADS"] = "1"
        spawn = get_context("spawn")  # an engine must not inherit another's threads
        cores = sorted(os.sched_getaffinity(0))
        free = spawn.Queue()
        for core in cores:
            free.put(core)
        self._pool = ProcessPoolExecutor(len(cores), spawn, _start, (free,))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def ask(self, draws: Iterable[Draw], arms: Sequence[Arm]) -> Iterator[Asked]:
        """Outcomes of all examples, in order."""
        return self._pool.map(partial(_ask, arms=arms), draws)


@contextmanager
def alone() -> Iterator["Alone"]:
    """The same in this process, on all cores."""
    with lab_engine() as lab:
        yield Alone(lab)


class Alone:
    """Asks examples of one engine."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def ask(self, draws: Iterable[Draw], arms: Sequence[Arm]) -> Iterator[Asked]:
        """Outcomes of all examples, in order."""
        return (_asked(self._lab, draw, arms) for draw in draws)


def _start(cores: Any) -> None:
    global _lab
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever handed the examples out ends it
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores.get())
    _lab = _engine.enter_context(lab_engine())


def _ask(draw: Draw, arms: Sequence[Arm]) -> Asked:
    return _asked(_lab, draw, arms)


def _asked(lab: Lab, draw: Draw, arms: Sequence[Arm]) -> Asked:
    drawn = example(**draw)
    return drawn, lab.ask(drawn, list(arms))
