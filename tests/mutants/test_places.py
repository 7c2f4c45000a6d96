# SPDX-License-Identifier: Apache-2.0
"""What notices a mutant is the mutant, not a test that fails whatever the sources are."""

from pathlib import Path

import pytest

from tests.mutants import copies
from tests.mutants.lists import Edit, Mutant, MutantsError
from tests.mutants.places import Place, Sources

ANSWER = "vllm_segreuse/answer.py"
ENGINE, BROKEN = "tests/e2e/test_engine.py", "tests/e2e/test_broken.py"


def mutant(test: str, replace: str = "41") -> Mutant:
    return Mutant((Edit(ANSWER, "42", replace),), "wrong", (test,), "here")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the copies that tests were run in: one test asks for 42, the other always fails."""
    runs: list[str] = []

    def copy_sources(to: Path) -> None:
        (to / ANSWER).parent.mkdir(parents=True)
        (to / ANSWER).write_text("ANSWER = 42\n")

    def failure(root: Path, *arguments: str) -> str | None:
        runs.append(root.name)
        right = "42" in (root / ANSWER).read_text() and arguments[-1] == ENGINE
        return None if right else arguments[-1]

    monkeypatch.setattr(copies, "copy_sources", copy_sources)
    monkeypatch.setattr(copies, "failure", failure)
    return runs


def test_tests_with_an_engine_are_run_once_without_a_mutant(
    tmp_path: Path, runs: list[str]
) -> None:
    with Place(Sources(tmp_path), tmp_path / "copy") as place:
        assert place.try_engine(mutant(ENGINE)) == ("engine tests", ENGINE)
        assert place.try_engine(mutant(ENGINE, "42.0")) == ("survived", "")
        assert runs == ["sources", "copy", "copy"]


def test_a_test_that_fails_unchanged_notices_nothing(tmp_path: Path, runs: list[str]) -> None:
    with Place(Sources(tmp_path), tmp_path / "copy") as place:
        for _ in range(2):
            with pytest.raises(MutantsError, match=f"fail unchanged in {BROKEN}: mend them first"):
                place.try_engine(mutant(BROKEN))
    assert runs == ["sources"]
