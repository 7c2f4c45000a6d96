# SPDX-License-Identifier: Apache-2.0
"""Markers in a page, and the text between them.

    <!-- figures: NAME -->                    a table of `figures.yaml`, with a line of its sources
    <!-- /figures -->
    <!-- figures: sources -->                 the sources of all figures in the page's running text
    <!-- /figures -->
    <!-- figure: MACHINE/SUITE {key:.2f} -->0.25<!-- / -->

A page of the site may also include a table, which `docs/generate.py` writes at every build and git
does not hold:

    ```{include} _generated/results/NAME.md
    ```

Code (between backticks, or fenced) may speak of markers without being meant.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = "sources"
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_IS_MARKER = re.compile(r"/$|/?\s*figure")
_BLOCK = re.compile(r"figures: ([\w.-]+)")
_INLINE = re.compile(r"figure: ([\w.-]+/[\w.-]+) (\S.*)")
_INCLUDED = re.compile(r"^```\{include\} _generated/results/([\w.-]+)\.md$", re.MULTILINE)
_GLOBS = ("*.md", "docs/**/*.md", "models/**/*.md", "examples/**/*.md", "bench/**/*.md")
_ERRORS = "surrogateescape"  # bytes that are no UTF-8 are left as they are


class Span(NamedTuple):
    """Text that is written from results.

    Attributes:
        name: of a block; "" for a figure in running text.
        source, value: of a figure in running text: results file and format.
        start, end: where the text between the markers lies in the page.
        line: of the marker, from 1.
    """

    name: str
    source: str
    value: str
    start: int
    end: int
    line: int


class Page(NamedTuple):
    """A page, its spans in order, and what is wrong with its markers.

    Attributes:
        included: (table, line) of what the built site shows there, and the page does not hold.
    """

    file: Path
    text: str
    spans: list[Span]
    findings: list[str]
    included: list[tuple[str, int]]

    def with_texts(self, texts: list[str]) -> str:
        """The page with other texts in its spans."""
        parts, done = [], 0
        for span, text in zip(self.spans, texts, strict=True):
            parts += [self.text[done : span.start], text]
            done = span.end
        return "".join([*parts, self.text[done:]])

    def write(self, root: Path, texts: list[str]) -> None:
        """Write the page with other texts in its spans."""
        # Bytes: line ends stay what they are.
        (root / self.file).write_bytes(self.with_texts(texts).encode(errors=_ERRORS))


def find(root: Path) -> Iterator[Page]:
    """All pages of a checkout."""
    for file in sorted({file for glob in _GLOBS for file in root.glob(glob)}):
        yield parse(file.relative_to(root), file.read_bytes().decode(errors=_ERRORS))


def parse(file: Path, text: str) -> Page:
    """Find the markers of a page."""
    included = [(it[1], text.count("\n", 0, it.start()) + 1) for it in _INCLUDED.finditer(text)]
    page = Page(file, text, [], [], included)
    opened: tuple[re.Match[str], Span] | None = None
    for comment in _COMMENT.finditer(_CODE.sub(lambda code: "·" * len(code[0]), text)):
        said = text[comment.start(1) : comment.end(1)]
        if not _IS_MARKER.match(said):
            continue
        line = text.count("\n", 0, comment.start()) + 1
        place, marker = f"{file}:{line}", f"<!-- {said.splitlines()[0]} -->"
        if opened is not None and said == _closing(opened[1]):
            page.spans.append(opened[1]._replace(end=comment.start()))
            opened = None
            continue
        if opened is not None:
            page.findings.append(f"{file}:{opened[1].line}: {opened[0][0]} is not closed")
            opened = None
        if said.startswith("/"):
            page.findings.append(f"{place}: {marker} closes nothing")
        elif (span := _opening(said, comment.end(), line)) is None:
            page.findings.append(f"{place}: unknown marker {marker}")
        else:
            opened = comment, span
    if opened is not None:
        page.findings.append(f"{file}:{opened[1].line}: {opened[0][0]} is not closed")
    return page


def _opening(said: str, start: int, line: int) -> Span | None:
    if block := _BLOCK.fullmatch(said):
        return Span(block[1], "", "", start, start, line)
    if inline := _INLINE.fullmatch(said):
        return Span("", inline[1], inline[2], start, start, line)
    return None


def _closing(span: Span) -> str:
    return "/figures" if span.name else "/"
