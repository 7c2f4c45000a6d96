# SPDX-License-Identifier: Apache-2.0
"""Makes one mistake after the other in a copy of the sources, and sees whether the tests notice.

    python scripts/mutants.py                        all of tests/mutants/, and a summary
    python scripts/mutants.py --only pin             those whose reason or text contains "pin"
    python scripts/mutants.py --file vllm_segreuse/scheduler.py
    python scripts/mutants.py --list http            those of tests/mutants/http.json
    python scripts/mutants.py --extra FILE.json      and those of another list; --list picks it, too
    python scripts/mutants.py --named                with no more than the tests that they name
    python scripts/mutants.py --engine               with engines, too, on what quick tests leave
    python scripts/mutants.py --sample 50            so many that nobody has seen, of no list
    python scripts/mutants.py --json FILE            all of it as JSON

Each is tried on the quick tests that it names, in a fork of a process that has vLLM loaded; where
these notice nothing, again in a process of its own, then on all quick ones (those of `make quick`);
then, where wanted, on the tests that it names whatever they need, alone, which must pass without
it. Exit status 1 if a mutant survives, 2 if one does not fit, or if the sources fail unchanged.
What is interrupted reports what it has.
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
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import environment, write_json
from tests.mutants import copies, lists, sampled
from tests.mutants.lists import Mutant, MutantsError, real_path
from tests.mutants.places import Place, Sources, quick_ones

T = TypeVar("T")

CORES = len(os.sched_getaffinity(0))
NOTICED = ("compiler", "named tests", "quick tests", "engine tests")


@dataclass
class Verdict:
    """Of one mutant.

    Attributes:
        what: one of `NOTICED`, "survived", "equal" (nobody could notice), or "misfit".
        how: the test that failed, or why there is no verdict.
    """

    mutant: Mutant
    what: str
    how: str
    seconds: float

    @property
    def row(self) -> dict[str, Any]:
        """For people and JSON."""
        return {
            "file": ", ".join(sorted(self.mutant.files)),
            "why": self.mutant.why,
            "list": self.mutant.origin,
            "verdict": self.what,
            "how": self.how,
            "seconds": round(self.seconds, 1),
        }


class Trial:
    """Verdicts on mutants, printed as they come; those before an interruption stay.

    Attributes:
        verdicts: so far.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.verdicts: list[Verdict] = []
        self._options = options
        self._stopped = False

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Try all of them.

        Raises:
            MutantsError: the sources fail unchanged.
        """
        equal = {mutant.edits: mutant.why for mutant in lists.load(lists.EQUAL)}
        fit = []
        for mutant in mutants:
            if mutant.edits in equal:
                self.verdicts.append(Verdict(mutant, "equal", equal[mutant.edits], 0.0))
            elif misfit := mutant.misfit(lists.REPOSITORY):
                self._add(mutant, "misfit", misfit, 0.0)
            else:
                fit.append(mutant)
        with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ExitStack() as ends:
            here = Path(directory).resolve()
            sources = Sources(here)
            numbers = range(min(self._options.jobs, len(fit)))
            places = [ends.enter_context(Place(sources, here / f"copy{n}")) for n in numbers]
            self._run(fit, sources, places)

    def _run(self, fit: list[Mutant], sources: Sources, places: list[Place]) -> None:
        tests, named_only = by_file(fit), self._options.named

        def unchanged(place: Place, file: str) -> None:
            if how := place.unchanged(file, tests[file]):
                raise MutantsError(f"the sources fail unchanged in {how}: mend them first")

        def quick(place: Place, mutant: Mutant) -> None:
            self._try(mutant, partial(place.try_quick, mutant, named_only))

        self._each(places, unchanged, tests)
        if fit and not named_only:
            workers = ("-n", str(self._options.jobs), "--dist", "worksteal")
            if how := copies.failure(sources.root, "-m", "not e2e", *workers):
                raise MutantsError(f"the sources fail unchanged in {how}: mend them first")
        self._each(places, quick, fit)
        for verdict in [*self.verdicts] if self._options.engine else []:
            if verdict.what == "survived":
                self.verdicts.remove(verdict)
                engine = partial(places[0].try_engine, verdict.mutant)
                self._try(verdict.mutant, engine, verdict.seconds)

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

    def _try(
        self, mutant: Mutant, attempt: Callable[[], tuple[str, str]], before: float = 0.0
    ) -> None:
        began = time.monotonic()
        try:
            what, how = attempt()
        except MutantsError as error:
            what, how = "misfit", str(error)
        if not self._stopped:
            self._add(mutant, what, how, before + time.monotonic() - began)

    def _add(self, mutant: Mutant, what: str, how: str, seconds: float) -> None:
        verdict = Verdict(mutant, what, how, seconds)
        self.verdicts.append(verdict)
        row = verdict.row
        print(f"{row['verdict']:12} {row['seconds']:5.0f} s  {row['file']}: {row['why'][:90]}")
        if how:
            print(f"{'':21} {how}")
        sys.stdout.flush()


def by_file(mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    """The quick tests that they name, by their file; the file stands for all of its tests."""
    found: dict[str, list[str]] = {}
    for test in sorted({test for mutant in mutants for test in quick_ones(mutant.tests)}):
        of_file = found.setdefault(test.partition("::")[0], [])
        if of_file != [test.partition("::")[0]]:
            of_file.append(test)
    return found


def summary(verdicts: Sequence[Verdict], listed: Sequence[Mutant]) -> dict[str, float | str]:
    """The figures that matter.

    Args:
        listed: all mutants of the lists, tried or not.
    """
    number = {what: sum(v.what == what for v in verdicts) for what in NOTICED}
    lacking = lists.with_too_few(listed)
    return {
        "mutants": len(verdicts),
        "caught_quick": sum(number.values()) - number["engine tests"],
        "caught_engine": number["engine tests"],
        "survived": sum(verdict.what == "survived" for verdict in verdicts),
        "equal": sum(verdict.what == "equal" for verdict in verdicts),
        "misfit": sum(verdict.what == "misfit" for verdict in verdicts),
        "files_covered": len({file for verdict in verdicts for file in verdict.mutant.files}),
        "modules_over_80_lines_without_three_mutants": len(lacking),
        "they_are": ", ".join(lacking) or "none",
    }


def choose(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that are asked for.

    Raises:
        MutantsError: there are none, or a list cannot be read.
    """
    if options.sample:
        print(f"seed {options.seed}")
        return sampled.sample(options.sample, options.seed)
    mutants = lists.load_all(options.extra)
    if options.list:
        mutants = [m for name in options.list for m in mutants if m.origin == name]
    if options.file:
        mutants = [mutant for mutant in mutants if real_path(options.file) in mutant.files]
    wanted = options.only.lower()
    chosen = [m for m in mutants if wanted in f"{m.why} {m.edits} {m.origin}".lower()]
    if not chosen:
        raise MutantsError("no mutant is like that: look into tests/mutants/")
    return chosen


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="reason or text contains it")
    parser.add_argument("--file", help="those of this source file")
    parser.add_argument(
        "--list",
        action="append",
        default=[],
        metavar="NAME",
        help="those of this list; may be repeated",
    )
    parser.add_argument(
        "--extra", type=Path, action="append", default=[], metavar="FILE", help="another list"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many that are drawn at random")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the draw (default: any)"
    )
    parser.add_argument("--named", action="store_true", help="only the tests that they name")
    parser.add_argument("--engine", action="store_true", help="also named tests with an engine")
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
    try:
        trial.run(choose(options))
    except MutantsError as error:
        print(error)
        status = 2
    except KeyboardInterrupt:
        print("interrupted")
        status = 130
    finally:
        result = report(trial.verdicts, options.json, where)
    return status or (2 if result["misfit"] else int(bool(result["survived"])))


def report(verdicts: list[Verdict], file: Path | None, where: dict[str, Any]) -> dict[str, Any]:
    """The summary, printed, and written with the verdicts."""
    try:
        listed = lists.load_all()
    except MutantsError:  # said before
        listed = []
    result = summary(verdicts, listed)
    for name, value in result.items():
        print(f"{name} = {value}")
    of_draw = [it for it in verdicts if it.mutant.origin == sampled.ORIGIN]
    caught = [(min(it.mutant.files), it.what in NOTICED) for it in of_draw if it.what != "misfit"]
    for folder, share in sampled.shares(caught).items():
        print(f"caught in {folder} = {share}")
    if file:
        rows = [verdict.row for verdict in verdicts]
        write_json(file, "mutants", where, {"rows": rows, "summary": result})
    return result


if __name__ == "__main__":
    sys.exit(main())
