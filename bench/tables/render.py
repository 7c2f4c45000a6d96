# SPDX-License-Identifier: Apache-2.0
"""Markdown from results."""

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tables import results
from bench.tables.definitions import GOAL, Column, Definitions, Figure, Head, Table
from bench.tables.formats import keys, written
from bench.tables.results import RESULTS, Finding, Result

SOURCES_PAGE = Path("docs", "figures.md")
"""The page that says of every results file how it was measured, below the heading "Sources"."""

_MISSED = " (missed)"
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt
}  # fmt: skip


class Renderer:
    """Writes tables and figures, and remembers what was wrong and which files it used.

    Attributes:
        findings: a sentence for each thing that is wrong, once.
        gaps: how many cells were left empty for that.
        used: every results file that something was written from.
    """

    def __init__(self, root: Path, definitions: Definitions) -> None:
        self.findings: list[str] = []
        self.gaps = 0
        self.used: set[Path] = set()
        self._root = root
        self._definitions = definitions
        self._results: dict[Path, Result | Finding] = {}

    def result(self, file: Path) -> Result:
        """A results file, read once.

        Raises:
            Finding: see `results.read`.
        """
        if file not in self._results:
            try:
                self._results[file] = results.read(self._root, file)
            except Finding as finding:
                self._results[file] = finding
        found = self._results[file]
        if isinstance(found, Finding):
            raise found
        return found

    def inline(self, source: str, value: str, used: list[Path]) -> str:
        """A figure in running text: `value`, a format of keys of the summary of `source`."""
        try:
            file = self._definitions.file(source)
            return written(value, self._measured(file, used).summary, str(file))
        except Finding as finding:
            self._note(finding)
            return ""

    def table(self, name: str, page: Path) -> str:
        """A table and the line of its sources, for a page (whose folder links start from)."""
        table = self._definitions.tables[name]
        used: list[Path] = []
        cells = self._figures(table, used) if table.figures else self._grid(name, table, used)
        return f"{_markdown(cells)}\n\n{self.sources(used, page)}"

    def sources(self, used: Sequence[Path], page: Path) -> str:
        """A line that links the results files, and the page that says how each was measured."""
        there = [file for file in dict.fromkeys(used) if self._is_there(file)]
        if not there:
            return "Not measured yet."
        links = ", ".join(_link(file, page) for file in there)
        how = os.path.relpath(SOURCES_PAGE, page.parent)
        return f"Source: {links} ([how it was measured]({how}#sources))."

    def all_sources(self, page: Path) -> str:
        """A table of every results file: machine, versions, commits, date, and its command."""
        cells = [["file", "machine", "commits", "date", "command"]]
        for name, machine in self._definitions.machines.items():
            for suite in machine.results:
                file = RESULTS / name / f"{suite}.json"
                try:
                    where = self.result(file).environment
                except Finding as finding:
                    self._note(finding)
                    continue
                commits = ", ".join(f"`{commit}`" for commit in where.measured_at)
                command = self._definitions.command(suite).replace("SUITE", suite)
                line = [_link(file, page), where.machine, commits, where.date[:10], f"`{command}`"]
                cells.append(line)
        return _markdown(cells)

    def _is_there(self, file: Path) -> bool:
        try:
            self.result(file)
        except Finding:
            return False  # it was said where the file was first used
        return True

    def _figures(self, table: Table, used: list[Path]) -> list[list[str]]:
        """Cells of a table with a line for each figure and a column for each machine."""
        having = [self._having(figure) for figure in table.figures]
        machines = [m for m in self._definitions.machines if any(m in them for them in having)]
        goals = any(figure.goal for figure in table.figures)
        heads = [self._definitions.machines[machine].title for machine in machines]
        cells = [["figure", *heads, *(["goal"] if goals else [])]]
        for figure, them in zip(table.figures, having, strict=True):
            line = [_label(figure, table.keys)]
            for machine in machines:
                line.append(self._figure(machine, figure, used) if machine in them else "")
            cells.append([*line, figure.goal or ""] if goals else line)
        return cells

    def _having(self, figure: Figure) -> list[str]:
        try:
            return self._definitions.machines_with(figure)
        except Finding as finding:
            self._note(finding)
            return []

    def _figure(self, machine: str, figure: Figure, used: list[Path]) -> str:
        file = RESULTS / machine / f"{figure.suite}.json"
        try:
            summary = self._measured(file, used).summary
            text = written(figure.value, summary, str(file))
            return text if _meets(figure, summary) else f"{text}{_MISSED}"
        except Finding as finding:
            self._note(finding)
            return ""

    def _measured(self, file: Path, used: list[Path]) -> Result:
        used.append(file)
        self.used.add(file)
        return self.result(file)

    def _grid(self, name: str, table: Table, used: list[Path]) -> list[list[str]]:
        """Cells of a table whose lines and columns select rows of results."""
        cells = [["", *(column.head for column in table.columns)]]
        for line in table.lines:
            cells.append([line.head])
            for column in table.columns:
                try:
                    cells[-1].append(self._cell(table, line, column, used))
                except Finding as finding:
                    self._note(finding)
                    cells[-1].append("")
        machines = {file.parent.name for file in used}
        if len(machines) > 1 and not table.mixed:
            names = ", ".join(sorted(machines))
            self._note(f"table {name!r} mixes machines ({names}) without saying so: set mixed")
        return cells

    def _cell(self, table: Table, line: Head, column: Column, used: list[Path]) -> str:
        file = self._definitions.file(column.source or table.source)
        where = line.where | column.where
        rows = [
            row
            for row in self._measured(file, used).rows
            if all(row.get(key) == value for key, value in where.items())
        ]
        if len(rows) != 1:
            raise Finding(f"{file} has {len(rows)} rows with {where}, and a table needs one")
        return written(column.value, rows[0], f"{file}, row {where},")

    def _note(self, finding: Finding | str) -> None:
        self.gaps += 1
        if str(finding) not in self.findings:
            self.findings.append(str(finding))


def _meets(figure: Figure, summary: Mapping[str, Any]) -> bool:
    goal = GOAL.fullmatch(figure.goal or "")
    if goal is None:
        return True
    key = keys(figure.value)[0]
    if not isinstance(summary[key], int | float):
        raise Finding(f"{figure.suite}: {key!r} has a goal, and is no number: {summary[key]!r}")
    return _HOLDS[goal[1]](summary[key], float(goal[2]))


def _label(figure: Figure, with_key: bool) -> str:
    key = f"`{keys(figure.value)[0]}`" if with_key else ""
    return ", ".join(part for part in (key, figure.what) if part)


def _link(file: Path, page: Path) -> str:
    """A link to a results file, by its machine and suite."""
    return f"[{file.parent.name}/{file.stem}]({os.path.relpath(file, page.parent)})"


def _markdown(cells: list[list[str]]) -> str:
    """A table, its first line the head; figures stand at the right."""
    ruler = ["---", *("---:" for _ in cells[0][1:])]
    lines = [cells[0], ruler, *cells[1:]]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
