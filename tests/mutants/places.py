# SPDX-License-Identifier: Apache-2.0
"""Where mutants are tried: copies of the sources, used again and again, with what tests them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants import copies
from tests.mutants.forks import Forks
from tests.mutants.lists import Mutant, MutantsError

QUICK = ("-m", "not e2e", "-p", "no:xdist")


class Sources:
    """What is copied: the sources as they were at first; edits made meanwhile do not count.

    Attributes:
        root: they are here, with all the machine code that their tests have made.
        objects: what has been compiled of native sources.
        alone: test files that pass, but not in a fork.
        with_engine: how tests that were run with engines fail without a mutant, or None.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / "sources"
        self.objects = directory / "objects"
        self.objects.mkdir()
        self.alone: set[str] = set()
        self.with_engine: dict[tuple[str, ...], str | None] = {}
        copies.copy_sources(self.root)


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

    def unchanged(self, file: str, tests: Sequence[str]) -> str | None:
        """How tests of one file fail without a mutant, or None. They leave their machine code."""
        root = self._sources.root
        try:
            if not self._forks.failure(root, *QUICK, *tests):
                return None
            how = self._own_process(root, *QUICK, *tests)
        except MutantsError:  # one is not there: its mutants do not fit, and the others count
            return None if tests == [file] else self.unchanged(file, [file])
        self._sources.alone.add(file)
        return how

    def try_quick(self, mutant: Mutant, named_only: bool) -> tuple[str, str]:
        """(what, how) of a verdict, from tests that need no engine."""
        named = quick_ones(mutant.tests)
        with self._changed(mutant) as how:
            if how:
                return "compiler", how
            in_fork = [t for t in named if t.partition("::")[0] not in self._sources.alone]
            if in_fork and (how := self._forks.failure(self._root, *QUICK, *in_fork)):
                return "named tests", how
            if named and (how := self._own_process(self._root, *QUICK, *named)):
                return "named tests", how
            if not named_only and (how := self._own_process(self._root, *QUICK)):
                return "quick tests", how
            return "survived", ""

    def try_engine(self, mutant: Mutant) -> tuple[str, str]:
        """(what, how) of a verdict, from the named tests with all that they need.

        Raises:
            MutantsError: they fail without the mutant, too.
        """
        tests, known = tuple(mutant.tests), self._sources.with_engine
        if not tests:
            return "survived", ""
        if tests not in known:
            known[tests] = self._own_process(self._sources.root, "--slow", *tests)
        if known[tests]:
            raise MutantsError(f"the sources fail unchanged in {known[tests]}: mend them first")
        with self._changed(mutant):
            how = self._own_process(self._root, "--slow", *tests)
        return ("engine tests", how) if how else ("survived", "")

    def _own_process(self, root: Path, *arguments: str) -> str | None:
        return None if self._stopped else copies.failure(root, *arguments)

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[str | None]:
        if not self._root.exists():
            shutil.copytree(self._sources.root, self._root, symlinks=True)
        try:
            yield copies.change(self._root, mutant, self._sources.objects)
        finally:
            copies.restore(self._root, self._sources.root)


def quick_ones(tests: Sequence[str]) -> list[str]:
    """Without those that can only be for engines."""
    return [test for test in tests if not test.startswith(("tests/e2e/", "tests/gpu/"))]
