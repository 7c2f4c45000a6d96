# SPDX-License-Identifier: Apache-2.0
"""Where mutants are tried: copies of the sources, used again and again, with what tests them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.mutants import copies
from tests.mutants.forks import Forks
from tests.mutants.sampled import Mutant

QUICK = ("-m", "not e2e", "-p", "no:xdist")
TOGETHER = 8
"""Files of tests in one run: a run has a limit of time."""


class Sources:
    """What is copied: the sources as they were at first; edits made meanwhile do not count.

    Attributes:
        root: they are here, with all the machine code that their tests have made.
        alone, in_forks: test files of which is known whether they pass in a process of their own
            only, or in forks, too.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.alone: set[str] = set()
        self.in_forks: set[str] = set()
        copies.copy_sources(root)


class Place:
    """One copy, for one mutant at a time; `with` ends what runs there."""

    def __init__(self, sources: Sources, root: Path) -> None:
        self._sources = sources
        self._root = root
        self._forks = Forks(sources.root)
        self._stopped = False

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self._forks.__exit__(*error)

    def stop(self) -> None:
        """End the run that is under way; what it says does not count."""
        self._stopped = True
        self._forks.stop()

    def tried(self, mutant: Mutant, tests: Mapping[str, float]) -> str | None:
        """The first test that notices a mutant; None: none does.

        Args:
            tests: files of tests, all of which pass without it, with the seconds that takes.
        """
        with self._changed(mutant):
            alone = [test for test in tests if test in self._sources.alone]
            rest = [test for test in tests if test not in alone]
            while rest:
                together = rest[:TOGETHER]
                how = self._in_fork(self._root, {test: tests[test] for test in together})
                file = (how or "").partition("::")[0]
                suspected = [file] if file in tests else together  # those that were not done
                if not how:
                    del rest[:TOGETHER]
                elif fail := [it for it in suspected if self._fails_in_forks(it, tests[it])]:
                    alone += fail
                    rest = [test for test in rest if test not in fail]
                else:
                    return how
            return self._own_process(self._root, *QUICK, *alone) if alone else None

    def _in_fork(self, root: Path, tests: Mapping[str, float]) -> str | None:
        return self._forks.failure(root, *QUICK, *tests, seconds=sum(tests.values()))

    def _fails_in_forks(self, file: str, seconds: float) -> bool:
        """Whether a file of tests fails in a fork without a mutant, too."""
        if file in self._sources.alone or file in self._sources.in_forks:
            return file in self._sources.alone
        fails = self._in_fork(self._sources.root, {file: seconds}) is not None
        (self._sources.alone if fails else self._sources.in_forks).add(file)
        return fails

    def _own_process(self, root: Path, *arguments: str) -> str | None:
        return None if self._stopped else copies.failure(root, *arguments)

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        if not self._root.exists():
            shutil.copytree(self._sources.root, self._root, symlinks=True)
        try:
            (self._root / mutant.file).write_text(mutant.text)
            copies.drop_machine_code(self._root, mutant.file)
            yield
        finally:
            copies.restore(self._root, self._sources.root)
