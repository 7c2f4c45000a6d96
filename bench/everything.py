# SPDX-License-Identifier: Apache-2.0
"""`python -m bench all --out DIR`: every suite that the README quotes, one after the other.

Each runs in a process of its own and leaves `DIR/SUITE.json`. A run that was stopped goes on where
it was: what is there already, of this commit, is not measured again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import harness

SUITES = (
    *("ttft", "kernels", "lookup", "overhead", "stall"),
    *("rag", "isolation", "churn", "soak", "demo"),
)
BUSY = 0.5
"""Load average above which others seem to compute on this machine."""

Measure = Callable[[str, Path, bool], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if a suite failed or the tree is dirty."""
    parser = argparse.ArgumentParser(prog="python -m bench all", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="rough answers")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code")
    args = parser.parse_args(argv)
    commit = harness.commit()
    if not args.allow_dirty and (commit is None or commit.endswith("-dirty")):
        return _complain(
            f"the code is {commit or 'of no commit'}: commit it first, since nobody could measure "
            "it again, or say --allow-dirty"
        )
    if (load := os.getloadavg()[0]) > BUSY:
        _complain(f"the machine is busy (load {load:.1f}): times will be too long")
    return measure_all(args.out, args.quick, commit)


def measure_all(out: Path, quick: bool, commit: str | None, measure: Measure | None = None) -> int:
    """Measure every suite; returns the exit status.

    Args:
        commit: of the code, as `harness.commit` tells it.
        measure: runs a suite so that it writes the file; returns its exit status.
    """
    failed = []
    for suite in SUITES:
        file = out / f"{suite}.json"
        if is_measured(file, suite, quick, commit):
            print(f"{suite}: {file} is of this commit already", flush=True)
            continue
        started = time.monotonic()
        status = (measure or run_suite)(suite, file, quick)
        took = f"{time.monotonic() - started:.0f} s"
        # A suite may end well and yet leave no result of this commit: files changed meanwhile.
        if status == 0 and _says(file, suite, quick, commit):
            print(f"{suite}: {took}", flush=True)
        else:
            why = f"exit status {status}" if status else f"{file} is not of commit {commit}"
            print(f"{suite}: failed ({why}) after {took}", flush=True)
            failed.append(suite)
    if failed:
        return _complain(f"failed: {', '.join(failed)}; the same command tries these again")
    return 0


def run_suite(suite: str, file: Path, quick: bool) -> int:
    """`python -m bench SUITE` in a process of its own."""
    command = [sys.executable, "-m", "bench", suite, "--json", str(file.absolute())]
    if quick:
        command.append("--quick")
    with subprocess.Popen(command, cwd=harness.REPOSITORY) as process:
        try:
            return process.wait()
        except BaseException:  # it has servers to stop, so it is not killed, as `run` would do
            process.terminate()
            process.wait()
            raise


def is_measured(file: Path, suite: str, quick: bool, commit: str | None) -> bool:
    """Whether it needs no measurement; a dirty tree may have changed since."""
    clean = commit is not None and not commit.endswith("-dirty")
    return clean and _says(file, suite, quick, commit)


def _says(file: Path, suite: str, quick: bool, commit: str | None) -> bool:
    """Whether the file is a result of that suite, commit and thoroughness."""
    try:
        content = json.loads(file.read_text())
        where = content["environment"]
        said = (content["suite"], where["commit"], where["quick"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return said == (suite, commit, quick)


def _complain(sentence: str) -> int:
    print(f"bench all: {sentence}", file=sys.stderr)
    return 1
