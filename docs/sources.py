# SPDX-License-Identifier: Apache-2.0
"""What the package's sources say: docstrings, and the sentences of its errors as Markdown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "vllm_segreuse"
EXTRAS = REPOSITORY / "segreuse_extras"


def files(*without: str) -> Iterator[Path]:
    """All files of the package and of the extras, except for those of some of its folders."""
    for file in [*sorted(PACKAGE.rglob("*.py")), *sorted(EXTRAS.rglob("*.py"))]:
        if not any(file.is_relative_to(PACKAGE / folder) for folder in without):
            yield file


@cache
def parsed(file: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(file.read_text())


def paragraphs(file: Path) -> list[str]:
    """Those of a module's docstring, each in one line."""
    text = ast.get_docstring(parsed(file))
    assert text, f"{file} has no docstring"
    return [one_line(paragraph) for paragraph in text.split("\n\n")]


def constant(file: Path, name: str) -> Any:
    """What a module assigns to a name, if that is written out."""
    for node in parsed(file).body:
        if isinstance(node, ast.Assign) and name in (getattr(it, "id", "") for it in node.targets):
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


def one_line(text: str) -> str:
    """A text with its lines joined."""
    return " ".join(text.split())


def escaped(text: str) -> str:
    """Plain text as Markdown."""
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", text)


def answers(file: Path) -> Iterator[tuple[int, str]]:
    """(status, sentence) of the calls `answer(STATUS, "...")` in a file."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "answer":
            status, text = node.args[0], sentence(node.args[1], file)
            if isinstance(status, ast.Constant) and isinstance(status.value, int) and text:
                yield status.value, text


def raised(file: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """(class, sentence) of what a file raises."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", "")
            arguments = node.exc.args[1 if name == "RequestError" else 0 :]
            if name in names and arguments and (text := sentence(arguments[0], file)):
                yield name, text


def faults(file: Path) -> Iterator[str]:
    """The sentences of the pairs `(whether, "sentence")` that a file's functions return."""
    for returned in ast.walk(parsed(file)):
        for node in ast.walk(returned) if isinstance(returned, ast.Return) else ():
            pair = node.elts if isinstance(node, ast.Tuple) else []
            if len(pair) == 2 and (text := sentence(pair[1], file)):
                yield text


def sentence(node: ast.expr, file: Path) -> str | None:
    """A text as Markdown, with the names of what is filled in; None if it says nothing itself."""
    told = "".join(_parts(node, file)).replace("``", "` `")  # two names side by side
    words = re.sub(r"`[^`]*`", "", told)
    return one_line(told) if len(re.findall(r"[a-z]{2,}", words)) > 2 else None


def _parts(node: ast.expr, file: Path) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield escaped(str(node.value))
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from _parts(part, file)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (*_parts(node.left, file), *_parts(node.right, file))
    elif isinstance(node, ast.FormattedValue):
        yield from _parts(node.value, file)
    elif isinstance(node, ast.Name) and (value := _assigned(file, node.id)) is not None:
        yield from _parts(*value)
    else:
        yield f"`{_name(node)}`"


def _assigned(file: Path, name: str) -> tuple[ast.expr, Path] | None:
    """The one text that a name is given in its file, or in that of ours which it comes from."""
    module = parsed(file)
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            (PACKAGE.name, EXTRAS.name)
        ):
            source = REPOSITORY / f"{str(node.module).replace('.', '/')}.py"
            if name in (alias.name for alias in node.names) and source.is_file():
                return _assigned(source, name)
    values = [
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and name in (getattr(it, "id", "") for it in node.targets)
    ]
    told = len(values) == 1 and isinstance(values[0], ast.Constant | ast.JoinedStr)
    return (values[0], file) if told else None


def _name(node: ast.expr) -> str:
    """What is filled in, in a word."""
    if isinstance(node, ast.Attribute):
        return "class" if node.attr in ("__name__", "__qualname__") else node.attr.strip("_")
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and node.args:
        return _name(node.args[-1])
    return "..."
