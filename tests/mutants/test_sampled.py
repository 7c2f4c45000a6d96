# SPDX-License-Identifier: Apache-2.0
"""Mutants that are drawn are small mistakes in code that runs, anywhere in the package."""

import ast
from pathlib import Path

import pytest

from tests.mutants import sampled
from tests.mutants.copies import REPOSITORY

PACKAGE = REPOSITORY / sampled.FOLDERS[0]

SOURCE = '''"""A text with 1 < 2."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LATER = 3


def f(a: int, b: "list[4]", *, c: bool = True) -> int:
    """Returns 5."""
    if a < b and not c:
        logger.info("%d", 6)
        notify(a)
    a += 7
    dict(zip(a, b, strict=True))
    answer: int = field(repr=False)
    a = b[-1] + 1e30
    return a * b if a is None else -a
'''


def mutated(path: Path) -> list[str]:
    source = path.read_bytes()
    return [
        (source[: it.start] + it.text.encode() + source[it.end :]).decode()
        for _, it in sampled.changes(path)
    ]


def test_each_kind_of_mistake_is_made_where_code_runs(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text(SOURCE)
    was = SOURCE.splitlines()
    changed = {
        (was[n].strip(), now.strip())
        for text in mutated(path)
        for n, now in enumerate(text.splitlines())
        if now != was[n]
    }
    assert changed == {
        (was[7], was[7].replace("True", "False")),
        ("if a < b and not c:", "if a <= b and not c:"),
        ("if a < b and not c:", "if a < b or not c:"),
        ("if a < b and not c:", "if a < b and (c):"),
        ("if a < b and not c:", "if (not (a < b and not c)):"),
        ("notify(a)", "pass"),
        ("a += 7", "a -= 7"),
        ("a += 7", "a += 8"),
        ("dict(zip(a, b, strict=True))", "pass"),
        ("a = b[-1] + 1e30", "a = b[0] + 1e30"),
        ("a = b[-1] + 1e30", "a = b[-1] - 1e30"),
        ("return a * b if a is None else -a", "return None"),
        ("return a * b if a is None else -a", "return a // b if a is None else -a"),
        ("return a * b if a is None else -a", "return a * b if a is not None else -a"),
        ("return a * b if a is None else -a", "return a * b if (not (a is None)) else -a"),
    }


@pytest.mark.parametrize("folder", sorted(p.name for p in PACKAGE.iterdir()))
def test_what_is_drawn_is_python(folder: str) -> None:
    path = PACKAGE / folder
    for file in [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))[:3]:
        before = ast.dump(ast.parse(file.read_bytes()))
        for text in mutated(file)[::7]:
            assert ast.dump(ast.parse(text)) != before


@pytest.mark.slow
def test_a_draw_can_be_repeated_and_changes_files_that_are_there() -> None:
    drawn = sampled.sample(30, 4, REPOSITORY)
    assert drawn == sampled.sample(30, 4, REPOSITORY)
    assert drawn != sampled.sample(30, 5, REPOSITORY)
    assert len({(mutant.file, mutant.text) for mutant in drawn}) == 30
    assert len({mutant.file for mutant in drawn}) > 15
    for mutant in drawn:
        assert mutant.text != (REPOSITORY / mutant.file).read_text()
        assert 1 <= mutant.line <= len((REPOSITORY / mutant.file).read_text().splitlines())


def test_a_draw_stays_within_what_is_asked_for() -> None:
    within = ["vllm_segreuse/plan", "vllm_segreuse/scheduling/scheduler.py"]
    files = {mutant.file for mutant in sampled.sample(60, 4, REPOSITORY, within)}
    assert "vllm_segreuse/scheduling/scheduler.py" in files
    assert {str(Path(file).parent) for file in files} == {
        "vllm_segreuse/scheduling",
        "vllm_segreuse/plan",
    }
    assert not sampled.sample(60, 4, REPOSITORY, ["tests"])


def test_a_sibling_of_the_package_is_drawn_from_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "FOLDERS", ("one", "packages/other"))
    for name, text in {
        "one/a.py": "A = 1\n",
        "packages/other/__init__.py": "B = 2\n",
        "packages/other/c/d.py": "C = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    drawn = sampled.sample(9, 0, tmp_path, sampled.FOLDERS)
    assert {mutant.file for mutant in drawn} == {
        *("one/a.py", "packages/other/__init__.py", "packages/other/c/d.py")
    }
    assert {(mutant.line, mutant.why[:7]) for mutant in drawn} == {(1, "line 1:")}
    caught = [(mutant.file, True) for mutant in drawn]
    assert list(sampled.shares(caught)) == ["one", "packages/other", "packages/other/c"]


def test_shares_are_by_folder() -> None:
    rows = [(f"vllm_segreuse/{it}.py", it != "a/y") for it in ("a/x", "a/y", "a/b/w", "z")]
    assert sampled.shares(rows) == {"vllm_segreuse": "1 of 1", "vllm_segreuse/a": "2 of 3"}
