# SPDX-License-Identifier: Apache-2.0
"""An explanation as a table for a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from segreuse_extras.viewer import words
from segreuse_extras.viewer.asking import Explanation

_COLOURS = {"prefix": "blue", "segment": "green", "similar": "cyan", "new": "yellow"}


def table(explanation: Explanation) -> Group:
    """One line per stretch, and what the request comes to."""
    shown = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for name in ("from", "tokens"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("source", no_wrap=True)
    shown.add_column("again", justify="right", no_wrap=True)
    shown.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    texts = explanation.texts or [""] * len(explanation.stretches)
    for stretch, text in zip(explanation.stretches, texts, strict=True):
        shown.add_row(
            f"{stretch['start']:,}",
            f"{stretch['tokens']:,}",
            Text(words.source(stretch), style=_COLOURS[stretch["source"]]),
            words.recomputed(stretch),
            Text(" ".join(text.split())),
        )
    edited = words.edited(explanation.edit)
    said = [Text(each) for each in (words.verdict(explanation.report), edited) if each]
    return Group(shown, Text(), *said)
