# SPDX-License-Identifier: Apache-2.0
"""Lists of mutants: what they change, and what they leave out. CONTRIBUTING.md has the format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LISTS = Path(__file__).resolve().parent
EQUAL = LISTS / "equal.json"

LONG_LINES = 80
LEAST_MUTANTS = 3
"""Of every module of more than `LONG_LINES` lines, and of every native kernel."""


class MutantsError(Exception):
    """The mutants say nothing: a list is broken, or the sources fail unchanged."""


@dataclass(frozen=True)
class Edit:
    """`find`, which occurs exactly once in `file`, becomes `replace`."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Mutant:
    """A mistake that tests have to notice.

    Attributes:
        why: what would go wrong.
        tests: files or tests that notice, the most telling first.
        origin: name of its list.
    """

    edits: tuple[Edit, ...]
    why: str
    tests: tuple[str, ...]
    origin: str

    @property
    def files(self) -> set[str]:
        """Real paths of what it changes: `vllm_segreuse/kernels` is a link."""
        return {real_path(edit.file) for edit in self.edits}

    def misfit(self, root: Path) -> str | None:
        """Why it cannot be applied to the sources there, or None."""
        for edit in self.edits:
            path = root / edit.file
            count = path.read_text().count(edit.find) if path.is_file() else 0
            if count != 1:
                return f"{edit.find!r} occurs {count} times in {edit.file}, not once"
        return None

    def apply(self, root: Path) -> None:
        """Change the sources there."""
        for edit in self.edits:
            path = root / edit.file
            path.write_text(path.read_text().replace(edit.find, edit.replace))


def real_path(file: str) -> str:
    """Path below the repository, without links."""
    return str((REPOSITORY / file).resolve().relative_to(REPOSITORY))


def load(path: Path) -> list[Mutant]:
    """The mutants of one list.

    Raises:
        MutantsError: it cannot be read, or is not of the format.
    """
    try:
        return [_mutant(entry, path.stem) for entry in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MutantsError(
            f"{path} is no list of mutants ({type(error).__name__}: {error}); "
            "CONTRIBUTING.md has the format"
        ) from None


def load_all(extra: Sequence[Path] = ()) -> list[Mutant]:
    """The mutants of all lists but `EQUAL`, and of lists from elsewhere.

    Each once, as the last list has it; one that names no tests gets those of a list before.
    """
    paths = [*sorted(path for path in LISTS.glob("*.json") if path != EQUAL), *extra]
    found: dict[tuple[Edit, ...], Mutant] = {}
    for mutant in (mutant for path in paths for mutant in load(path)):
        known = found.get(mutant.edits)
        found[mutant.edits] = replace(mutant, tests=mutant.tests or (known.tests if known else ()))
    return list(found.values())


def modules() -> list[str]:
    """What must have mutants: long modules of the package, and native kernels."""
    python = REPOSITORY.glob("vllm_segreuse/**/*.py")
    long = [path for path in python if len(path.read_text().splitlines()) > LONG_LINES]
    native = [*REPOSITORY.glob("kernels/*/*.cpp"), *REPOSITORY.glob("kernels/*/*.cu")]
    return sorted({real_path(str(path)) for path in [*long, *native]})


def with_too_few(mutants: Sequence[Mutant]) -> list[str]:
    """Modules that have fewer mutants than they must."""
    counts = Counter(file for mutant in mutants for file in mutant.files)
    return [module for module in modules() if counts[module] < LEAST_MUTANTS]


def _mutant(entry: dict, origin: str) -> Mutant:
    edits = entry.get("edits", [entry])
    return Mutant(
        tuple(Edit(edit["file"], edit["find"], edit["replace"]) for edit in edits),
        entry["why"],
        tuple(entry.get("tests", ())),
        origin,
    )
