# SPDX-License-Identifier: Apache-2.0
"""Mutants: small mistakes at places of the package that are drawn at random.

Each kind of mistake is a function from a node of a syntax tree to what takes the place of a part of
its source. What only people read (docstrings, messages, annotations) is left as it is, and
`zip(strict=True)`: it asserts what holds, and without it nothing that works works otherwise.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("vllm_segreuse", "segreuse_extras", "segreuse_store", "segreuse_tools")
"""Packages that mistakes are made in: paths from the root of the repository."""

_COMPARISONS = dict(
    it
    for one, other in (("==", "!="), ("<", "<="), (">", ">="), ("in", "not in"), ("is", "is not"))
    for it in ((one, other), (other, one))
)
_ARITHMETIC = dict(
    it
    for one, other in (("+", "-"), ("*", "//"), ("&", "|"), ("<<", ">>"))
    for it in ((one, other), (other, one))
) | {"/": "*", "%": "//", "**": "*", "^": "&"}
_SHOWING = ("repr", "use_tqdm")
"""Arguments that only change what is shown to people: the text of an object, a progress bar."""
_SAYING = ("debug", "info", "warning", "error", "exception", "critical", "warning_once", "print")
"""Calls whose arguments only people read."""


class Mutant(NamedTuple):
    """A mistake that tests have to notice.

    Attributes:
        file: path of the source file below the root.
        text: of the whole file, with the mistake.
        line: that the mistake is in.
        why: what was changed, and where.
    """

    file: str
    text: str
    line: int
    why: str


class Change(NamedTuple):
    """`source[start:end]` becomes `text`; positions in bytes of UTF-8."""

    start: int
    end: int
    text: str


class _File:
    """One source file, with the positions of its syntax tree in bytes."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_bytes()
        self.tree = ast.parse(self.source)
        self._lines = [0]
        for line in self.source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def line(self, position: int) -> int:
        """Number, from 1, of the line that a byte is in."""
        return self.source.count(b"\n", 0, position) + 1

    def between(self, left: ast.expr, right: ast.expr, others: dict[str, str]) -> Iterator[Change]:
        """Another operator between two operands."""
        start, end = self.end(left), self.start(right)
        gap = self.source[start:end].decode()
        names = "|".join(sorted(map(re.escape, others), key=len, reverse=True))
        if found := re.search(rf"(?<![\w<>=!*/])({names})(?![\w<>=*/])", gap):
            yield Change(start + found.start(), start + found.end(), others[found.group()])


def _comparison(file: _File, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, right in pairwise(operands):
            yield from file.between(left, right, _COMPARISONS)


def _arithmetic(file: _File, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp):
        yield from file.between(node.left, node.right, _ARITHMETIC)
    elif isinstance(node, ast.AugAssign):
        others = {f"{one}=": f"{other}=" for one, other in _ARITHMETIC.items()}
        start, end = file.end(node.target), file.start(node.value)
        operator = file.source[start:end].decode().strip()
        if operator in others:
            yield Change(start, end, f" {others[operator]} ")


def _logic(file: _File, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        other = {"and": "or"} if isinstance(node.op, ast.And) else {"or": "and"}
        for left, right in pairwise(node.values):
            yield from file.between(left, right, other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Change(file.start(node), file.end(node), f"({file.text(node.operand)})")


def _condition(file: _File, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        test = node.test
        yield Change(file.start(test), file.end(test), f"(not ({file.text(test)}))")


def _constant(file: _File, node: ast.AST) -> Iterator[Change]:
    value = _number(node)
    if value is not None and isinstance(node, ast.expr):
        other = not value if isinstance(value, bool) else value + 1
        if other != value:  # as 1e30 + 1 is 1e30
            yield Change(file.start(node), file.end(node), repr(other))


def _number(node: ast.AST) -> bool | int | float | None:
    """The value of a literal number; its sign belongs to it."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return node.value
    return None


def _statement(file: _File, node: ast.AST) -> Iterator[Change]:
    """A call that is left out, a result that is lost, a loop that ends otherwise."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield Change(file.start(node), file.end(node), "pass")
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield Change(file.start(node.value), file.end(node.value), "None")
    elif isinstance(node, ast.Break | ast.Continue):
        other = "continue" if isinstance(node, ast.Break) else "break"
        yield Change(file.start(node), file.end(node), other)
    elif isinstance(node, ast.Raise):
        yield Change(file.start(node), file.end(node), "pass")


KINDS: tuple[Callable[[_File, ast.AST], Iterator[Change]], ...] = (
    *(_comparison, _arithmetic, _logic, _condition, _constant, _statement),
)


def changes(path: Path) -> list[tuple[int, Change]]:
    """(line, change) of every mistake that a file offers, in the order of the file."""
    file = _File(path)
    found = [
        change for node in _running(file.tree.body) for kind in KINDS for change in kind(file, node)
    ]
    return [(file.line(change.start), change) for change in sorted(set(found))]


def _running(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes that run, and that not only people read."""
    for node in nodes:
        if _is_for_people(node):
            continue
        yield node
        yield from _running(
            child
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "returns", "decorator_list", "type_params")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST) and _number(node) is None
            if not _asserts_lengths(node, child)
        )


def _asserts_lengths(call: ast.AST, argument: ast.AST) -> bool:
    """Whether this is the argument of `zip(..., strict=True)`."""
    is_zip = isinstance(call, ast.Call) and ast.unparse(call.func) == "zip"
    return is_zip and ast.unparse(argument) == "strict=True"


def _is_for_people(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in _SHOWING
    call = node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        return name in _SAYING
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


def sample(count: int, seed: int, root: Path, within: Sequence[str] = FOLDERS) -> list[Mutant]:
    """So many mutants, each at a place of its own, drawn from all places alike.

    Args:
        seed: of the draw; equal sources and seeds give equal mutants.
        root: of the repository.
        within: files and folders, as paths below the root, whose places are drawn from.
    """
    paths = [it for folder in FOLDERS for it in sorted((root / folder).rglob("*.py"))]
    wanted = [root / it for it in within]
    paths = [it for it in paths if any(it.is_relative_to(one) for one in wanted)]
    places = [(path, *it) for path in paths for it in changes(path)]
    drawn = random.Random(seed).sample(places, min(count, len(places)))
    return [_mutant(root, *it) for it in drawn]


def _mutant(root: Path, path: Path, line: int, change: Change) -> Mutant:
    source, file = path.read_bytes(), str(path.relative_to(root))
    text = source[: change.start] + change.text.encode() + source[change.end :]
    was = source[change.start : change.end].decode()
    why = f"line {line}: {_short(was)} became {_short(change.text) or 'nothing'}"
    return Mutant(file, text.decode(), line, why)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def shares(rows: Sequence[tuple[str, bool]]) -> dict[str, str]:
    """How many of the mutants of each folder were caught, of (file, whether it was)."""
    by_folder: dict[str, list[bool]] = {}
    for file, caught in rows:
        folder = next(it for it in FOLDERS if Path(file).is_relative_to(it))
        below = Path(file).relative_to(folder).parts
        by_folder.setdefault("/".join([folder, *below[:-1][:1]]), []).append(caught)
    return {it: f"{sum(has)} of {len(has)}" for it, has in sorted(by_folder.items())}
