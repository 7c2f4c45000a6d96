# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.plot CURVE.jsonl ... PICTURE.svg`: loss and accuracy over tokens.

Several curves are runs that went on from each other's model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def read(curves: Sequence[Path]) -> list[dict[str, Any]]:
    """Entries of all curves, tokens counted on from one to the next."""
    entries: list[dict[str, Any]] = []
    for curve in curves:
        before = entries[-1]["tokens"] if entries else 0
        for line in curve.read_text().splitlines():
            entry = json.loads(line)
            entries.append(entry | {"tokens": before + entry["tokens"]})
    return entries


def draw(entries: Sequence[dict[str, Any]]) -> Figure:
    """Loss above, accuracy by kind of question below; grey lines where the length grows."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    tokens = [entry["tokens"] / 1e6 for entry in entries]
    above.plot(tokens, [entry["loss"] for entry in entries], color="0.2")
    above.set(ylabel="loss", yscale="log")
    for kind in sorted({kind for entry in entries for kind in entry["accuracy"]}):
        points = [
            (token, entry["accuracy"][kind])
            for token, entry in zip(tokens, entries, strict=True)
            if kind in entry["accuracy"]
        ]
        below.plot(*zip(*points, strict=True), label=kind, linewidth=1.2)
    below.set(xlabel="tokens, million", ylabel="accuracy", ylim=(0, 1.02))
    below.legend(fontsize=8, ncols=2, loc="lower right")
    length = 0
    for token, entry in zip(tokens, entries, strict=True):
        if entry["length"] != length:
            length = entry["length"]
            for axes in (above, below):
                axes.axvline(token, color="0.85", zorder=0)
            above.annotate(f" {length}", (token, above.get_ylim()[1]), fontsize=8, va="top")
    return figure


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curves", type=Path, nargs="+", help="curve.jsonl of each run, in order")
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "train"
    draw(read(given.curves)).savefig(given.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
