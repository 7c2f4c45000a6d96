# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest that do not wait for imports: forks of a process that has them.

What they find counts; that they find nothing does not: a process of its own has the last word.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from bench.server import cpu_environment
from tests.mutants import copies, forking
from tests.mutants.copies import MutantsError
from tests.mutants.sampled import FOLDERS

_PROGRAM = Path(forking.__file__).resolve()
_SCANNED = (*FOLDERS, "bench", "tests")
_OURS = (*(Path(it).name for it in _SCANNED), "examples", "scripts", "haste")
_ENGINES = ("e2e", "gpu")


class Forks:
    """One such process; `with` ends it, and the run that is under way.

    Args:
        sources: whose imports are wanted, those of its own packages left out.
    """

    def __init__(self, sources: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        self._tell({"foreign": foreign_imports(sources), "ours": _OURS})

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._process.wait()

    def stop(self) -> None:
        """End it; whoever waits for a run gets None."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def failure(self, root: Path, *arguments: str, seconds: float) -> str | None:
        """How the tests of a copy fail, or None where that needs a process of its own.

        Args:
            arguments: of pytest.
            seconds: that the tests take unchanged.

        Raises:
            MutantsError: the tests would run other sources than those of the copy.
        """
        with tempfile.NamedTemporaryFile("r", prefix="mutant-", suffix=".log") as log:
            every = [*copies.PYTEST, *arguments]
            where = {"root": str(root.resolve()), "log": log.name}
            self._tell({**where, "arguments": every, "seconds": seconds})
            answer = self._process.stdout.readline()  # type: ignore[union-attr]
            output = Path(log.name).read_text(errors="replace")
        if not answer:
            return None
        code = json.loads(answer)["code"]
        if isinstance(code, str):
            raise RuntimeError(f"no forks: {code}")
        if code == forking.OTHER_SOURCES:
            raise MutantsError(f"the tests would run other sources than the copy in {root}")
        if code is None:
            return f"not done within {forking.wall_s(seconds)} s"
        if -code in (signal.SIGXCPU, signal.SIGKILL):
            return f"not done within {forking.cpu_s(seconds)} s of the processor"
        return copies.told(code, output) and copies.first_failure(output)

    def _tell(self, order: dict[str, object]) -> None:
        try:
            self._process.stdin.write(f"{json.dumps(order)}\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:  # its end shows where the answer is read
            pass


def foreign_imports(sources: Path) -> list[tuple[str, list[str]]]:
    """What the sources and their quick tests import from elsewhere: modules, and names of them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (path for part in _SCANNED for path in sorted((sources / part).rglob("*.py"))):
        if path.relative_to(sources).parts[1] in _ENGINES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name] |= set()
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found[node.module] |= {alias.name for alias in node.names}
    return [
        (module, sorted(names))
        for module, names in found.items()
        if module.partition(".")[0] not in _OURS
    ]


def _environment() -> dict[str, str]:
    """As tests/conftest.py wants it before torch is there, without threads that no fork has."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**cpu_environment(), **without, **fixed}
