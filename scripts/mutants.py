# SPDX-License-Identifier: Apache-2.0
"""Makes mistakes, drawn at random, in copies of the sources, and sees whether the tests notice.

    python scripts/mutants.py 50                  so many, anywhere in the packages
    python scripts/mutants.py 20 --within vllm_segreuse/cache vllm_segreuse/scheduling/scheduler.py
    python scripts/mutants.py 50 --seed 7         a draw again (from the same sources)
    python scripts/mutants.py 50 --json FILE      all of it as JSON

All quick tests (those of `make quick`) run once, unchanged, to know which of them run which line.
Each mutant is then tried on those that run its line, in forks of a process that has vLLM loaded.
Files of tests that fail unchanged notice nothing: they are named, and left out. Exit status 1 if a
mutant survives, 2 if nothing can be tried. What is interrupted reports what it has.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import environment, write_json
from tests.mutants import copies, lines, sampled
from tests.mutants.copies import MutantsError
from tests.mutants.places import Place, Sources
from tests.mutants.sampled import Mutant

T = TypeVar("T")

CORES = len(os.sched_getaffinity(0))


@dataclass
class Verdict:
    """Of one mutant.

    Attributes:
        how: the first test that noticed; None: it survived.
        files: of tests that were to notice.
    """

    mutant: Mutant
    how: str | None
    files: int
    seconds: float

    @property
    def is_caught(self) -> bool:
        return self.how is not None

    @property
    def row(self) -> dict[str, Any]:
        """For people and JSON."""
        return {
            "file": self.mutant.file,
            "why": self.mutant.why,
            "verdict": "caught" if self.is_caught else "survived",
            "how": self.how or f"{self.files} files of tests run it",
            "seconds": round(self.seconds, 1),
        }


class Trial:
    """Verdicts on mutants, printed as they come; those before an interruption stay.

    Attributes:
        verdicts: so far.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.verdicts: list[Verdict] = []
        self._traced = lines.Traced({}, {}, {}, {})
        self._options = options
        self._stopped = False

    def run(self) -> None:
        """Draw mutants, and try all of them.

        Raises:
            MutantsError: no test can be run, or there is nothing to draw from.
        """
        options = self._options
        with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ExitStack() as ends:
            here = Path(directory).resolve()
            sources = Sources(here / "sources")
            drawn = sampled.sample(options.count, options.seed, sources.root, options.within)
            if not drawn:
                raise MutantsError(f"no source files of the packages in {options.within}")
            self._traced = lines.traced(sources.root, sampled.FOLDERS, options.jobs)
            for how in self.left_out.values():
                print(f"left out, since it fails unchanged: {how}", flush=True)
            numbers = range(min(options.jobs, len(drawn)))
            places = [ends.enter_context(Place(sources, here / f"copy{n}")) for n in numbers]
            self._each(places, self._try, drawn)

    @property
    def left_out(self) -> dict[str, str]:
        """By file of tests that fails without a mutant, the first test that does."""
        return self._traced.failed

    def _try(self, place: Place, mutant: Mutant) -> None:
        began = time.monotonic()
        files = self._traced.tests(mutant.file, mutant.line)
        tests = {file: self._traced.seconds[file] for file in files}
        how = place.tried(mutant, tests)
        if not self._stopped:
            self._add(Verdict(mutant, how, len(tests), time.monotonic() - began))

    def _add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        row = verdict.row
        print(f"{row['verdict']:8} {row['seconds']:5.0f} s  {row['file']}: {row['why'][:90]}")
        print(f"{'':17} {row['how']}", flush=True)

    def _each(
        self, places: Sequence[Place], work: Callable[[Place, T], None], items: Iterable[T]
    ) -> None:
        """Do the work on every item, in whatever place is free."""
        free: SimpleQueue[Place] = SimpleQueue()
        for place in places:
            free.put(place)

        def one(item: T) -> None:
            place = free.get()
            try:
                work(place, item)
            finally:
                free.put(place)

        with ThreadPoolExecutor(max(1, len(places))) as pool:
            try:
                list(pool.map(one, items))
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for place in places:
                    place.stop()
                copies.end_all()
                raise


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="mutants to draw")
    parser.add_argument(
        "--within",
        nargs="+",
        default=sampled.FOLDERS,
        metavar="PATH",
        help="files and folders of the packages to draw from (default: all of it)",
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the draw (default: any)"
    )
    parser.add_argument("--jobs", type=int, default=CORES, help="mutants at a time (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write verdicts and summary")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    options = parse(arguments)
    where = environment()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    trial, status = Trial(options), 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {options.seed}")
    try:
        trial.run()
    except MutantsError as error:
        print(error)
        status = 2
    except KeyboardInterrupt:
        print("interrupted")
        status = 130
    finally:
        result = report(trial.verdicts, options.json, where)
    return status or int(bool(result["survived"]))


def report(verdicts: list[Verdict], file: Path | None, where: dict[str, Any]) -> dict[str, Any]:
    """The summary, printed, and written with the verdicts."""
    survived = sum(not it.is_caught for it in verdicts)
    shares = sampled.shares([(it.mutant.file, it.is_caught) for it in verdicts])
    result = {
        "mutants": len(verdicts),
        "caught": len(verdicts) - survived,
        "survived": survived,
        **{f"caught in {folder}": share for folder, share in shares.items()},
    }
    for name, value in result.items():
        print(f"{name} = {value}")
    if file:
        rows = [verdict.row for verdict in verdicts]
        write_json(file, "mutants", where, {"rows": rows, "summary": result})
    return result


if __name__ == "__main__":
    sys.exit(main())
