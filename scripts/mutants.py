# SPDX-License-Identifier: Apache-2.0
"""Makes one mistake after the other in a copy of the sources, and sees whether the tests notice.

    python scripts/mutants.py                        all of tests/mutants/, and a summary
    python scripts/mutants.py --only pin             those whose reason or text contains "pin"
    python scripts/mutants.py --file vllm_segreuse/scheduler.py
    python scripts/mutants.py --list http            those of tests/mutants/http.json
    python scripts/mutants.py --extra FILE.json      and those of another list; --list picks it, too
    python scripts/mutants.py --named                with no more than the tests that they name
    python scripts/mutants.py --engine               with engines, too, on what quick tests leave
    python scripts/mutants.py --json FILE            all of it as JSON

Each is tried on the quick tests that it names, then on all quick ones (those of `make quick`), side
by side with others; then, where wanted, on the tests that it names whatever they need, alone. Exit
status 1 if a mutant survives, 2 if one does not fit, or if the sources fail unchanged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import environment, write_json
from tests.mutants import copies, lists
from tests.mutants.lists import Mutant, MutantsError, real_path

CORES = len(os.sched_getaffinity(0))
QUICK = ("-m", "not e2e")
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


def try_quick(sources: Path, mutant: Mutant, named_only: bool) -> tuple[str, str]:
    """(what, how) of a verdict, from tests that need no engine."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        root = Path(directory).resolve() / "copy"
        shutil.copytree(sources, root, symlinks=True)
        if how := copies.change(root, mutant):
            return "compiler", how
        named = quick_ones(mutant.tests)
        if named and (how := copies.failure(root, *QUICK, "-p", "no:xdist", *named)):
            return "named tests", how
        if not named_only and (how := copies.failure(root, *QUICK, "-p", "no:xdist")):
            return "quick tests", how
        return "survived", ""


def try_engine(sources: Path, mutant: Mutant) -> tuple[str, str]:
    """(what, how) of a verdict, from the named tests with all that they need."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        root = Path(directory).resolve() / "copy"
        shutil.copytree(sources, root, symlinks=True)
        copies.change(root, mutant)
        how = copies.failure(root, "--slow", *mutant.tests) if mutant.tests else None
        return ("engine tests", how) if how else ("survived", "")


def quick_ones(tests: Sequence[str]) -> list[str]:
    """Without those that can only be for engines."""
    return [test for test in tests if not test.startswith(("tests/e2e/", "tests/gpu/"))]


def timed(mutant: Mutant, attempt: Callable[[], tuple[str, str]], before: float = 0.0) -> Verdict:
    """A verdict, printed."""
    began = time.monotonic()
    verdict = Verdict(mutant, *attempt(), before + time.monotonic() - began)
    row = verdict.row
    print(f"{row['verdict']:12} {row['seconds']:5.0f} s  {row['file']}: {row['why'][:90]}")
    print(f"{'':21} {verdict.how}" if verdict.how else "", end="\n" if verdict.how else "")
    sys.stdout.flush()
    return verdict


def try_all(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[Verdict]:
    """Verdicts on all of them.

    Raises:
        MutantsError: the sources fail unchanged.
    """
    equal = {mutant.edits: mutant.why for mutant in lists.load(lists.EQUAL)}
    verdicts, fit = [], []
    for mutant in mutants:
        if mutant.edits in equal:
            verdicts.append(Verdict(mutant, "equal", equal[mutant.edits], 0.0))
        elif misfit := mutant.misfit(lists.REPOSITORY):
            verdicts.append(timed(mutant, lambda misfit=misfit: ("misfit", misfit)))
        else:
            fit.append(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        sources = Path(directory).resolve() / "sources"  # what is edited meanwhile does not count
        copies.copy_sources(sources)
        named = quick_ones(sorted({test for mutant in fit for test in mutant.tests}))
        chosen = named if options.named else []
        workers = ("-n", str(options.jobs), "--dist", "worksteal")
        if fit and (how := copies.failure(sources, *QUICK, *workers, *chosen)):
            raise MutantsError(f"the sources fail unchanged in {how}: mend them first")

        def quick(mutant: Mutant) -> Verdict:
            return timed(mutant, lambda: try_quick(sources, mutant, options.named))

        with ThreadPoolExecutor(options.jobs) as pool:
            tried = list(pool.map(quick, fit))
        for verdict in tried:
            if verdict.what == "survived" and options.engine:
                mutant = verdict.mutant
                verdict = timed(mutant, lambda m=mutant: try_engine(sources, m), verdict.seconds)
            verdicts.append(verdict)
    return verdicts


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
    mutants = lists.load_all(options.extra)
    if options.list:
        mutants = [mutant for mutant in mutants if mutant.origin == options.list]
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
    parser.add_argument("--list", metavar="NAME", help="those of this list")
    parser.add_argument(
        "--extra", type=Path, action="append", default=[], metavar="FILE", help="another list"
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
    try:
        verdicts = try_all(choose(options), options)
        result = summary(verdicts, lists.load_all())
    except MutantsError as error:
        print(error)
        return 2
    for name, value in result.items():
        print(f"{name} = {value}")
    if options.json:
        rows = [verdict.row for verdict in verdicts]
        write_json(options.json, "mutants", where, {"rows": rows, "summary": result})
    return 2 if result["misfit"] else int(bool(result["survived"]))


if __name__ == "__main__":
    sys.exit(main())
