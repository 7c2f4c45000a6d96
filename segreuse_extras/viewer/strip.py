# SPDX-License-Identifier: Apache-2.0
"""An explanation as a strip: each stretch of the prompt as a bar, recomputed tokens as heat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segreuse_extras.viewer import words

WIDTH = 1000
"""Units of a strip's width."""

LEAST_WIDTH = 5.0
"""Of a bar, so that a single token of a long prompt can be seen."""

CELL_WIDTH = 4.0
"""About that of a cell of the heat map."""

COLOURS = 4
"""Segments take turns in so many."""


@dataclass(frozen=True)
class Cell:
    """Some tokens of a segment, of which a share is computed again."""

    x: float
    width: float
    share: float


@dataclass(frozen=True)
class Bar:
    """One stretch of a prompt.

    Attributes:
        number: from 1 on, in order.
        colour: the style's name for it.
        x, width: of `WIDTH`; short stretches are wider than their share.
        start, tokens: of the stretch.
        source: where it comes from, in words.
        again: share that is computed again, in words; "" where that is not known.
        measured: whether it is known.
        text: its beginning; "" if not known.
        heat: where tokens are computed again.
    """

    number: int
    colour: str
    x: float
    width: float
    start: int
    tokens: int
    source: str
    again: str
    measured: bool
    text: str
    heat: list[Cell]

    @property
    def label(self) -> str:
        """All of it but the text, in one sentence."""
        stop = self.start + self.tokens - 1
        where = (
            f"token {self.start:,}" if self.tokens == 1 else f"tokens {self.start:,} to {stop:,}"
        )
        again = f", {self.again} computed again" if self.again else ""
        return f"{self.number}. {where}: {self.source}{again}"


@dataclass(frozen=True)
class Strip:
    """A prompt.

    Attributes:
        bars: its stretches, in order.
        verdict: what would be reused, or why nothing would, in a sentence.
        tokens: of the prompt.
        measured: whether it is known of any stretch what is computed again.
    """

    bars: list[Bar]
    verdict: str
    tokens: int
    measured: bool


def strip(report: Mapping[str, Any], texts: Sequence[str] = ()) -> Strip:
    """Lay an explained request out.

    Args:
        report: of the request, with `explain`.
        texts: the beginning of each stretch's text; empty: not known.
    """
    stretches = report["explain"]
    shown = [" ".join(text.split()) for text in texts] or [""] * len(stretches)
    bars = [
        Bar(
            number,
            colour,
            x,
            width,
            stretch["start"],
            stretch["tokens"],
            words.source(stretch),
            words.recomputed(stretch),
            stretch.get("recomputed") is not None,
            text,
            [*_heat(stretch, x, width)],
        )
        for number, (stretch, text, colour, (x, width)) in enumerate(
            zip(stretches, shown, _colours(stretches), _places(stretches), strict=True), 1
        )
    ]
    total = report["prompt_tokens"]
    return Strip(bars, words.verdict(report), total, any(bar.measured for bar in bars))


def _colours(stretches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Neighbouring segments, of different donors, have different ones."""
    segments = 0
    for stretch in stretches:
        if stretch["source"] == "segment":
            yield f"segment-{segments % COLOURS}"
            segments += 1
        else:
            yield stretch["source"]


def _places(stretches: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    total = sum(stretch["tokens"] for stretch in stretches)
    wanted = [max(LEAST_WIDTH, WIDTH * stretch["tokens"] / total) for stretch in stretches]
    scale, x = WIDTH / sum(wanted), 0.0
    for width in wanted:
        yield x, width * scale
        x += width * scale


def _heat(stretch: Mapping[str, Any], x: float, width: float) -> Iterator[Cell]:
    """The segment in cells of equal length, those without recomputed tokens left out."""
    runs = stretch.get("recomputed") or []
    count = min(stretch["tokens"], max(1, round(width / CELL_WIDTH)))
    length = stretch["tokens"] / count  # tokens; a fraction of one may be in either neighbour
    for i in range(count):
        low = stretch["start"] + i * length
        covered = sum(
            max(0.0, min(low + length, first + tokens) - max(low, first)) for first, tokens in runs
        )
        if covered > 1e-6:
            yield Cell(x + i * width / count, width / count, covered / length)
