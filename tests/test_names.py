# SPDX-License-Identifier: Apache-2.0
"""A class is found by its name."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("vllm_segreuse", "segreuse_tools")

Definition = tuple[str, ast.stmt]
"""Where it is, and what it is."""


@pytest.fixture(scope="module")
def definitions() -> list[Definition]:
    """Every statement of the packages, at any depth."""
    return [
        (f"{path.relative_to(REPOSITORY)}:{node.lineno}", node)
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.stmt)
    ]


def test_no_two_classes_have_the_same_name(definitions: list[Definition]) -> None:
    places = defaultdict(list)
    for where, node in definitions:
        if isinstance(node, ast.ClassDef):
            places[node.name].append(where)
    assert len(places) > 300
    assert {name: it for name, it in places.items() if len(it) > 1} == {}
