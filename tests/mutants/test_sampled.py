# SPDX-License-Identifier: Apache-2.0
"""Mutants that are drawn are small mistakes in code that runs, anywhere in the package."""

import ast
from pathlib import Path

import pytest

from tests.mutants import sampled
from tests.mutants.lists import REPOSITORY

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
        ("return a * b if a is None else -a", "return None"),
        ("return a * b if a is None else -a", "return a // b if a is None else -a"),
        ("return a * b if a is None else -a", "return a * b if a is not None else -a"),
        ("return a * b if a is None else -a", "return a * b if (not (a is None)) else -a"),
    }


@pytest.mark.parametrize("folder", sorted(p.name for p in (REPOSITORY / sampled.PACKAGE).iterdir()))
def test_what_is_drawn_is_python(folder: str) -> None:
    path = REPOSITORY / sampled.PACKAGE / folder
    for file in [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))[:3]:
        before = ast.dump(ast.parse(file.read_bytes()))
        for text in mutated(file)[::7]:
            assert ast.dump(ast.parse(text)) != before


def test_a_draw_can_be_repeated_and_fits() -> None:
    drawn = sampled.sample(30, seed=4)
    assert drawn == sampled.sample(30, seed=4)
    assert drawn != sampled.sample(30, seed=5)
    assert len({mutant.edits for mutant in drawn}) == 30
    assert len({file for mutant in drawn for file in mutant.files}) > 15
    for mutant in drawn:
        assert mutant.misfit(REPOSITORY) is None
        assert all((REPOSITORY / test).is_file() for test in mutant.tests)


def test_tests_of_a_modules_own_name_come_first() -> None:
    tests = {"p.a.b": ["tests/test_other.py", "tests/a/test_b.py"], "p.a.c": ["tests/test_c.py"]}
    assert sampled._tests_of("p.a.b", tests) == ["tests/a/test_b.py", "tests/test_other.py"]
    assert sampled._tests_of("p.a.d", tests) == [
        *("tests/a/test_b.py", "tests/test_c.py", "tests/test_other.py")
    ]


def test_shares_are_by_folder() -> None:
    rows = [("p/a/x.py", True), ("p/a/y.py", False), ("p/z.py", True)]
    assert sampled.shares(rows) == {"p/a": "1 of 2", sampled.PACKAGE: "1 of 1"}
