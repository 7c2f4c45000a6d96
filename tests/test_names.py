# SPDX-License-Identifier: Apache-2.0
"""A class is found by its name, and a function fits on a screen."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("vllm_segreuse", "segreuse_extras", "segreuse_store", "segreuse_tools")
MOST_LINES, MOST_ARGUMENTS, MOST_EXCEPTIONS = 70, 7, 3

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def definitions() -> list[tuple[str, Definition]]:
    """Classes and functions of the packages, at any depth, and where they are."""
    return [
        (f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}", node)
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Definition)
    ]


def functions(
    definitions: list[tuple[str, Definition]],
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Without kernels and compiled loops, which take arrays one by one."""
    for where, node in definitions:
        if not isinstance(node, ast.ClassDef) and "/kernels/" not in where:
            decorators = [ast.unparse(it) for it in node.decorator_list]
            if "kernel" not in decorators:
                yield where, node


def test_no_two_classes_have_the_same_name(definitions: list[tuple[str, Definition]]) -> None:
    places = defaultdict(list)
    for where, node in definitions:
        if isinstance(node, ast.ClassDef):
            places[node.name].append(where)
    assert len(places) > 300
    assert {name: it for name, it in places.items() if len(it) > 1} == {}


def test_no_function_is_long(definitions: list[tuple[str, Definition]]) -> None:
    lengths = {where: (it.end_lineno or 0) - it.lineno + 1 for where, it in functions(definitions)}
    assert {where: n for where, n in lengths.items() if n > MOST_LINES} == {}


def test_few_functions_have_many_arguments(definitions: list[tuple[str, Definition]]) -> None:
    """Two of them take the place of vLLM's attention, whose arguments they have."""
    counts: dict[str, int] = {}
    for where, node in functions(definitions):
        given = node.args
        names = [it.arg for it in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        counts[where] = len([name for name in names if name not in ("self", "cls")])
    many = {where: n for where, n in counts.items() if n > MOST_ARGUMENTS}
    assert len(many) <= MOST_EXCEPTIONS, many
