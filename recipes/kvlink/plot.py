# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes.kvlink.plot FOLDER ...`: `training.svg` of each folder's `curve.jsonl`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def draw(entries: Sequence[dict[str, Any]]) -> Figure:
    """Loss above, share of right tokens of the answers below, over steps."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [entry["step"] for entry in entries]
    above.plot(steps, [entry["loss"] for entry in entries], color="0.2")
    above.set(ylabel="loss", yscale="log")
    below.plot(steps, [entry["accuracy"] for entry in entries], color="0.2")
    below.set(xlabel="steps", ylabel="right tokens of answers", ylim=(0, 1.02))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    return figure


def write(folder: Path) -> None:
    """Draw `curve.jsonl` of a folder beside it."""
    entries = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    mpl.rcParams["svg.hashsalt"] = "kvlink"  # the same figures give the same file
    draw(entries).savefig(folder / "training.svg", metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="with curve.jsonl of a training")
    for folder in parser.parse_args().folders:
        write(folder)


if __name__ == "__main__":
    main()
