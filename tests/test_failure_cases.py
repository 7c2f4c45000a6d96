# SPDX-License-Identifier: Apache-2.0
"""Every case of docs/guarantees.md has a test named after its number."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guarantees.md"


def cases() -> set[int]:
    """The numbers of all cases."""
    section = PAGE.read_text().partition("\n## What can go wrong\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| \d", line)
    ]
    assert all(len(row) == 3 and row[1] and row[2] for row in rows)
    numbers = [int(row[0]) for row in rows]
    assert numbers == list(range(1, len(rows) + 1))
    assert numbers
    return set(numbers)


def cases_tested() -> dict[int, list[str]]:
    """Names of the tests that say which case they are about."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                numbers = re.match(r"test_((?:\d\d_)+)", node.name)
                for number in numbers[1].split("_")[:-1] if numbers else ():
                    found[int(number)].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_case_has_a_test_and_every_number_is_a_case() -> None:
    assert cases_tested().keys() == cases()
