# SPDX-License-Identifier: Apache-2.0
"""Where mutants are tried: copies of the sources, used again and again, with what tests them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants import copies
from tests.mutants.forks import Forks
from tests.mutants.sampled import Mutant

QUICK = ("-m", "not e2e", "-p", "no:xdist")


class Sources:
    """What is copied: the sources as they were at first; edits made meanwhile do not count.

    Attributes:
        root: they are here, with all the machine code that their tests have made.
        alone: test files that pass, but not in a fork.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.alone: set[str] = set()
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

    def unchanged(self, file: str) -> str | None:
        """How tests of one file fail without a mutant, or None. They leave their machine code."""
        root = self._sources.root
        if not self._forks.failure(root, *QUICK, file):
            return None
        how = self._own_process(root, *QUICK, file)
        self._sources.alone.add(file)
        return how

    def tried(self, mutant: Mutant, named_only: bool) -> tuple[str, str]:
        """(what, how) of a verdict: which tests notice a mutant, and the first one that fails.

        Args:
            named_only: leave out the tests that it does not name.
        """
        with self._changed(mutant):
            in_fork = [test for test in mutant.tests if test not in self._sources.alone]
            if in_fork and (how := self._forks.failure(self._root, *QUICK, *in_fork)):
                return "named tests", how
            if mutant.tests and (how := self._own_process(self._root, *QUICK, *mutant.tests)):
                return "named tests", how
            if not named_only and (how := self._own_process(self._root, *QUICK)):
                return "quick tests", how
            return "survived", ""

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
