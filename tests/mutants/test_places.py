# SPDX-License-Identifier: Apache-2.0
"""What notices a mutant is the mutant, not a test that fails whatever the sources are."""

from pathlib import Path

import pytest

from scripts import mutants
from tests.mutants import copies, forks
from tests.mutants.copies import MutantsError
from tests.mutants.places import Place, Sources
from tests.mutants.sampled import Mutant

ANSWER = "vllm_segreuse/answer.py"
RIGHT, BROKEN, FORKED = "tests/test_answer.py", "tests/test_broken.py", "tests/test_forked.py"


def mutant(answer: int, *tests: str) -> Mutant:
    return Mutant(ANSWER, f"ANSWER = {answer}\n", "wrong", tests)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(copy, last argument) of each process of tests.

    One test asks for an answer of 42, another one always fails, and the third one fails in forks.
    """
    runs: list[tuple[str, str]] = []

    def copy_sources(to: Path) -> None:
        (to / ANSWER).parent.mkdir(parents=True)
        (to / ANSWER).write_text("ANSWER = 42\n")

    def failure(root: Path, *arguments: str) -> str | None:
        runs.append((root.name, arguments[-1]))
        is_right = "42" in (root / ANSWER).read_text() and arguments[-1] != BROKEN
        return None if is_right else arguments[-1]

    def in_fork(self: forks.Forks, root: Path, *arguments: str) -> str | None:
        return failure(root, *arguments) if FORKED not in arguments else FORKED

    monkeypatch.setattr(copies, "copy_sources", copy_sources)
    monkeypatch.setattr(copies, "failure", failure)
    monkeypatch.setattr(forks.Forks, "failure", in_fork)
    return runs


def test_a_mutant_is_tried_on_its_tests_then_on_all(
    tmp_path: Path, runs: list[tuple[str, str]]
) -> None:
    with Place(Sources(tmp_path / "sources"), tmp_path / "copy") as place:
        assert place.tried(mutant(41, RIGHT), named_only=False) == ("named tests", RIGHT)
        assert place.tried(mutant(42, RIGHT), named_only=True) == ("survived", "")
        assert place.tried(mutant(42, RIGHT), named_only=False) == ("survived", "")
        assert runs == [("copy", RIGHT)] * 5 + [("copy", "no:xdist")]
        assert (tmp_path / "copy" / ANSWER).read_text() == "ANSWER = 42\n"


def test_a_failure_in_a_fork_alone_is_not_the_mutants(
    tmp_path: Path, runs: list[tuple[str, str]]
) -> None:
    with Place(Sources(tmp_path / "sources"), tmp_path / "copy") as place:
        assert place.unchanged(FORKED) is None
        assert place.tried(mutant(42, FORKED), named_only=True) == ("survived", "")
        assert place.tried(mutant(41, FORKED), named_only=True) == ("named tests", FORKED)


def test_a_test_that_fails_unchanged_ends_the_trial(
    tmp_path: Path, runs: list[tuple[str, str]]
) -> None:
    trial = mutants.Trial(mutants.parse(["1"]))
    with Place(Sources(tmp_path / "sources"), tmp_path / "copy") as place:
        with pytest.raises(MutantsError, match=f"fail unchanged in {BROKEN}: mend them first"):
            trial.check_unchanged(place, BROKEN)
        trial.check_unchanged(place, RIGHT)
