# SPDX-License-Identifier: Apache-2.0
"""What notices a mutant is the mutant, not a test that fails whatever the sources are."""

from pathlib import Path

import pytest

from tests.mutants import copies, forks
from tests.mutants.places import TOGETHER, Place, Sources
from tests.mutants.sampled import Mutant

pytestmark = pytest.mark.slow

ANSWER = "vllm_segreuse/answer.py"
RIGHT, FORKED, HANGING = (f"tests/test_{it}.py" for it in ("answer", "forked", "hanging"))


def mutant(answer: int) -> Mutant:
    return Mutant(ANSWER, f"ANSWER = {answer}\n", 1, "wrong")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(copy, last argument) of each process of tests.

    One file of tests asks for an answer of 42, and the other one also fails in forks.
    """
    runs: list[tuple[str, str]] = []

    def copy_sources(to: Path) -> None:
        (to / ANSWER).parent.mkdir(parents=True)
        (to / ANSWER).write_text("ANSWER = 42\n")

    def failure(root: Path, *arguments: str) -> str | None:
        runs.append((root.name, arguments[-1]))
        is_right = "42" in (root / ANSWER).read_text()
        return None if is_right else f"{arguments[-1]}::test_it"

    def in_fork(self: forks.Forks, root: Path, *arguments: str, seconds: float) -> str | None:
        if HANGING in arguments and (root.name == "copy" or seconds > 1):
            return "not done within 5 s"
        found = failure(root, *arguments)
        return f"{FORKED}::test_it" if FORKED in arguments else found

    monkeypatch.setattr(copies, "copy_sources", copy_sources)
    monkeypatch.setattr(copies, "failure", failure)
    monkeypatch.setattr(forks.Forks, "failure", in_fork)
    return runs


def test_a_mutant_is_tried_on_files_of_tests_until_one_notices(
    tmp_path: Path, runs: list[tuple[str, str]]
) -> None:
    many = [f"tests/test_{n}.py" for n in range(TOGETHER)]
    with Place(Sources(tmp_path / "sources"), tmp_path / "copy") as place:
        assert place.tried(mutant(41), {RIGHT: 1}) == f"{RIGHT}::test_it"
        assert place.tried(mutant(42), dict.fromkeys([*many, RIGHT], 1)) is None
        assert place.tried(mutant(41), {}) is None
        assert runs == [("copy", RIGHT), ("sources", RIGHT), ("copy", many[-1]), ("copy", RIGHT)]
        assert (tmp_path / "copy" / ANSWER).read_text() == "ANSWER = 42\n"


def test_a_failure_in_a_fork_alone_is_not_the_mutants(
    tmp_path: Path, runs: list[tuple[str, str]]
) -> None:
    with Place(Sources(tmp_path / "sources"), tmp_path / "copy") as place:
        assert place.tried(mutant(42), {FORKED: 1, RIGHT: 1}) is None
        assert place.tried(mutant(41), {FORKED: 1}) == f"{FORKED}::test_it"


@pytest.mark.parametrize("seconds", [1, 2])
def test_who_is_not_done_has_failed_unless_that_needs_no_mutant(
    tmp_path: Path, runs: list[tuple[str, str]], seconds: float
) -> None:
    """Those that take longer than one second hang in forks of unchanged sources, too."""
    tests = {RIGHT: 0.1, HANGING: seconds}
    with Place(Sources(tmp_path / "sources"), tmp_path / "copy") as place:
        found = [place.tried(mutant(answer), tests) for answer in (42, 41)]
    assert found == (["not done within 5 s"] * 2 if seconds == 1 else [None, f"{RIGHT}::test_it"])
