# SPDX-License-Identifier: Apache-2.0
"""`python -m bench tables [--check]`: write the figures of all pages from `bench/results/`."""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import harness
from bench.tables import definitions, pages, results
from bench.tables.definitions import Definitions
from bench.tables.pages import SOURCES, Page
from bench.tables.render import Renderer
from bench.tables.results import RESULTS, Finding


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if something does not hold, with a sentence for each."""
    parser = argparse.ArgumentParser(
        prog="python -m bench tables",
        description="Write the figures of README and docs from bench/results/, as "
        f"{definitions.FILE} says.",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; is all as it says?")
    parser.add_argument("--root", type=Path, default=harness.REPOSITORY, help="of the checkout")
    args = parser.parse_args(argv)
    found = list(check(args.root.resolve(), write=not args.check))
    for sentence in found:
        print(f"bench tables: {sentence}", file=sys.stderr)
    if not found:
        print("every figure is that of its file")
    return int(bool(found))


def check(root: Path, write: bool = False) -> Iterator[str]:
    """What does not hold, a sentence for each.

    Args:
        root: of the checkout.
        write: bring the pages up to date, instead of telling how they differ.
    """
    try:
        defined = definitions.read(root)
    except Finding as finding:
        yield str(finding)
        return
    renderer = Renderer(root, defined)
    named = set()
    for page in pages.find(root):
        named |= {span.name for span in page.spans} | {name for name, _ in page.included}
        texts = _texts(page, renderer, defined)
        _render_included(page, renderer, defined)
        yield from page.findings
        if not write:
            yield from _differences(page, texts)
        elif not page.findings:
            page.write(root, [text for text, _ in texts])
    yield from renderer.findings
    for name in sorted(defined.tables.keys() - named):
        yield f"{definitions.FILE}: the table {name!r} stands on no page"
    yield from _check_files(root, renderer, defined)


def _texts(page: Page, renderer: Renderer, defined: Definitions) -> list[tuple[str, bool]]:
    """What the page's spans should hold, and whether all of it is known.

    Adds to the page's findings.
    """
    in_text: list[Path] = []
    texts: list[tuple[str, bool]] = []
    for span in page.spans:
        gaps = renderer.gaps
        if not span.name:
            text = renderer.inline(span.source, span.value, in_text)
        elif span.name in defined.tables:
            text = f"\n{renderer.table(span.name, page.file)}\n"
        else:
            text = ""  # the sources, known at the page's end
            if span.name != SOURCES:
                page.findings.append(f"{page.file}:{span.line}: unknown table {span.name!r}")
        texts.append((text, renderer.gaps == gaps and text != ""))
    listed = [index for index, span in enumerate(page.spans) if span.name == SOURCES]
    known = all(it[1] for span, it in zip(page.spans, texts, strict=True) if not span.name)
    for index in listed:
        texts[index] = f"\n{renderer.sources(in_text, page.file)}\n", known
    if in_text and not listed:
        page.findings.append(
            f"{page.file}: figures in running text, and no '<!-- figures: {SOURCES} -->' that "
            "says where they come from"
        )
    return texts


def _render_included(page: Page, renderer: Renderer, defined: Definitions) -> None:
    """Render what the built site shows: its results are used, and have to be there.

    Adds to the page's findings.
    """
    for name, line in page.included:
        if name in defined.tables:
            renderer.table(name, page.file)
        elif name != SOURCES:
            page.findings.append(f"{page.file}:{line}: unknown table {name!r}")


def _differences(page: Page, texts: list[tuple[str, bool]]) -> Iterator[str]:
    """Where the page does not say what its results do; what could not be written is no measure."""
    for span, (text, known) in zip(page.spans, texts, strict=True):
        has = page.text[span.start : span.end]
        if not known or has.splitlines() == text.splitlines():
            continue
        what = f"the table {span.name!r}" if span.name else f"a figure of {span.source}"
        is_, should = _first_difference(has, text)
        yield f"{page.file}:{span.line}: {what} says {is_!r} where its results say {should!r}"


def _first_difference(has: str, text: str) -> tuple[str, str]:
    pairs = itertools.zip_longest(has.splitlines(), text.splitlines(), fillvalue="")
    return next((one, other) for one, other in pairs if one != other)


def _check_files(root: Path, renderer: Renderer, defined: Definitions) -> Iterator[str]:
    """Every file of the results: is it used, where it belongs, and of a known commit?"""
    for name in defined.kept:
        if not (root / RESULTS / name).is_file():
            yield f"{definitions.FILE}: {RESULTS / name} is to be kept, and does not exist"
    listed = {
        RESULTS / m / f"{suite}.json" for m, it in defined.machines.items() for suite in it.results
    }
    there = {it.relative_to(root) for it in (root / RESULTS).rglob("*") if not it.is_dir()}
    history = results.History(root)
    for file in sorted(there | listed):
        kept = str(file.relative_to(RESULTS)) in defined.kept
        if not kept and file.with_suffix(".json") not in renderer.used:
            yield f"{file} is used by no page: use it, delete it, or list it as kept"
        if file.suffix == ".json":
            yield from _check_file(file, history, renderer, defined)


def _check_file(
    file: Path, history: results.History, renderer: Renderer, defined: Definitions
) -> Iterator[str]:
    try:
        result = renderer.result(file)
    except Finding as finding:
        if str(finding) not in renderer.findings:
            yield str(finding)
        return
    command = defined.command(file.stem)
    yield from results.check_provenance(history, file, result, command)
    machine = defined.machines.get(file.parent.name)
    if machine is None:
        yield f"{file}: {definitions.FILE} knows no machine {file.parent.name!r}"
    elif sentence := machine.misplaced(file, result):
        yield sentence
