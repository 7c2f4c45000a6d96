# SPDX-License-Identifier: Apache-2.0
"""Which files of tests run which lines of the package: a mistake is tried on those only.

Lines that run when a module is imported belong to whoever imports it, and coverage does not see
those of functions that numba compiles: for both, all count that run any line of the file, or of
one that imports it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import coverage

from tests.mutants import copies, tracing
from tests.mutants.copies import MutantsError

QUICK = ("-m", "not e2e", "--ignore=tests/e2e", "--hypothesis-profile=quick")


class Traced(NamedTuple):
    """A run of all quick tests on unchanged sources.

    Attributes:
        seconds: of each file of tests.
        failed: by file of tests that fails, the first test that does.
        lines: by source file and line, the files of tests that run it; "" is for those that run it
            while they are collected.
        importers: by source file, those that import it.
    """

    seconds: dict[str, float]
    failed: dict[str, str]
    lines: dict[str, dict[int, set[str]]]
    importers: dict[str, set[str]]

    def tests(self, file: str, line: int) -> list[str]:
        """The files of tests that may notice a change of a line, the quickest first."""
        found = self.lines.get(file, {}).get(line, set())
        if "" in found or not found:
            files = {file} | self.importers.get(file, set())
            found = {
                test for it in files for tests in self.lines.get(it, {}).values() for test in tests
            }
        known = (found & self.seconds.keys()) - self.failed.keys()
        return sorted(known, key=lambda test: (self.seconds[test], test))


def traced(root: Path, folders: Sequence[str], jobs: int) -> Traced:
    """Run all quick tests of a copy.

    Args:
        root: the copy.
        folders: packages whose lines are wanted, below it.
        jobs: processes.

    Raises:
        MutantsError: no test could be run.
    """
    with tempfile.TemporaryDirectory(prefix="traced-") as directory:
        here = Path(directory)
        settings, seconds = here / "rc", here / "seconds.json"
        sources = "\n    ".join(str(root / folder) for folder in folders)
        settings.write_text(
            f"[run]\nparallel = true\ndata_file = {here / 'data'}\n"
            f"source =\n    {sources}\ncontext = ${{{tracing.FILE}-}}\n"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "COVERAGE_PROCESS_START": str(settings),
            tracing.SECONDS: str(seconds),
            tracing.FILE: "",  # a test of this may run within such a run
        }
        workers = ("-n", str(jobs), "--dist", "loadfile")
        plugins = ("-p", "no:cacheprovider", "-p", tracing.__name__)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugins, *QUICK, *workers],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
        )
        if not seconds.exists():
            raise MutantsError(f"no test could be run: {(done.stdout + done.stderr)[-500:]}")
        failed: dict[str, str] = {}
        for test in re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE):
            failed.setdefault(test.partition("::")[0], test)
        run = _lines(settings, here, root)
        return Traced(json.loads(seconds.read_text()), failed, run, _importers(root, folders))


def _lines(settings: Path, folder: Path, root: Path) -> dict[str, dict[int, set[str]]]:
    all_processes = coverage.Coverage(config_file=str(settings))
    with warnings.catch_warnings():  # of files that killed processes left unfinished
        warnings.simplefilter("ignore", coverage.exceptions.CoverageWarning)
        all_processes.combine([str(folder)])
    together = all_processes.get_data()
    return {
        str(Path(file).relative_to(root)): {
            line: {context.strip("|").rpartition("|")[2] for context in contexts}
            for line, contexts in together.contexts_by_lineno(file).items()
        }
        for file in together.measured_files()
    }


def _importers(root: Path, folders: Sequence[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        for imported in copies.imported(path, root):
            name = str(imported.relative_to(root))
            found.setdefault(name, set()).add(str(path.relative_to(root)))
    return found
