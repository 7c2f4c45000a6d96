# SPDX-License-Identifier: Apache-2.0
"""A run of the quality lab as one HTML page: tables as the papers print them, and two plots."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from bench.harness import Row, SuiteResult
from bench.quality.engine import IntArray
from bench.quality.tasks import RULER, Example

_MARKS = "o^svDP*Xhp<"
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;text-align:right}
td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f4f4}
th{border-bottom:2px solid #444}svg{max-width:100%;height:auto}small{color:#555}"""


def write(
    file: Path,
    where: Mapping[str, Any],
    result: SuiteResult,
    example: Example,
    computed: Mapping[str, IntArray],
) -> None:
    """Write the page.

    Args:
        file: where to.
        where: environment of the run.
        result: of the suite.
        example: whose computed tokens are drawn.
        computed: `[layers, tokens]` by policy, see `Lab.computed_tokens`.
    """
    mpl.rcParams["svg.hashsalt"] = "quality"  # the same figures give the same file
    rows = result["rows"]
    parts = [
        "<!doctype html><meta charset=utf-8><title>Quality of KV reuse</title>",
        f"<style>{_STYLE}</style><h1>Quality of KV reuse</h1>",
        f"<p>{html.escape(_sentence(where, rows))}</p>",
        "<h2>Accuracy</h2>",
        _table(rows),
        "<small>Mean, and half the width of its 95 % interval (bootstrap). Work: share of "
        "(token, layer) pairs computed; KL: of the first answer token from full prefill, in nats; "
        "TTFT: median.</small>",
        "<h2>Quality against computed work</h2>",
        _svg(pareto(rows)),
        "<h2>Which tokens were computed, at which layers</h2>",
        f"<p>One example of {html.escape(example.task)}, {html.escape(example.kind)}. "
        "Lines: borders of documents.</p>",
        _svg(layers(example, computed)),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts) + "\n", encoding="utf-8")


def pareto(rows: Sequence[Row]) -> Figure:
    """Accuracy over work: mean of the RULER tasks, and variable tracking, where methods differ."""
    tasks = [task for task in ("RULER", "vt") if any(row["task"] == task for row in rows)]
    figure = Figure(figsize=(5 * len(tasks) + 1.5, 4.2), layout="constrained")
    for axes, task in zip(np.atleast_1d(figure.subplots(1, len(tasks))), tasks, strict=True):
        mine = [row for row in rows if row["task"] == task]
        _front(axes, mine)
        for row, mark in zip(mine, cycle(_MARKS), strict=False):
            error = [[row["accuracy"] - row["low"]], [row["high"] - row["accuracy"]]]
            label = row["policy"]
            axes.errorbar(row["work"], row["accuracy"], error, fmt=mark, capsize=3, label=label)
        axes.set(title=task, xlabel="computed work, share of full prefill", ylabel="accuracy")
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _front(axes: Axes, rows: Sequence[Row]) -> None:
    """A step line through what no other policy beats at less work."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["work"], -row["accuracy"])):
        if not front or row["accuracy"] > front[-1]["accuracy"]:
            front.append(row)
    axes.step(
        [row["work"] for row in front],
        [row["accuracy"] for row in front],
        where="post",
        color="0.7",
        zorder=0,
    )


def layers(example: Example, computed: Mapping[str, IntArray]) -> Figure:
    """Layers over positions for each policy: never, once, or more often computed."""
    figure = Figure(figsize=(11, 1.15 * len(computed)), layout="constrained")
    borders = np.cumsum([len(example.prefix), *map(len, example.documents)])
    colours = ListedColormap(["#f2f2f2", "#3b75af", "#c44e52"])
    for axes, (policy, count) in zip(
        np.atleast_1d(figure.subplots(len(computed), 1, sharex=True)),
        computed.items(),
        strict=True,
    ):
        # A token is a fraction of a pixel wide: each column shows the most of some tokens.
        width = -(-count.shape[1] // 512)
        padded = np.pad(count, ((0, 0), (0, -count.shape[1] % width)))
        shown = padded.reshape(len(count), -1, width).max(-1)
        axes.imshow(
            np.minimum(shown, 2),
            aspect="auto",
            origin="lower",
            cmap=colours,
            vmin=0,
            vmax=2,
            interpolation="nearest",
            extent=(0, padded.shape[1], 0, len(count)),
        )
        axes.vlines(borders, 0, len(count), color="0.4", linewidth=0.6)
        axes.set_ylabel(policy, rotation=0, ha="right", va="center")
        axes.set_yticks([0, len(count)])
    axes.set_xlabel("position (grey: reused; blue: computed; red: computed more than once)")
    return figure


def _table(rows: Sequence[Row]) -> str:
    """Policies down, tasks across."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["task"], row["policy"]): row for row in rows}
    means = "RULER" in tasks
    head = ["policy", *tasks, "work", "KL", "TTFT, ms"]
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
    for policy in policies:
        line = [html.escape(policy)]
        for task in tasks:
            row = cells[task, policy]
            half = (row["high"] - row["low"]) / 2
            line.append(f"{row['accuracy']:.3f} <small>&plusmn;{half:.3f}</small>")
        mean = cells["RULER" if means else tasks[0], policy]
        line += [f"{mean['work']:.3f}", f"{mean['first_token_kl']:.3f}", f"{mean['ttft_ms']:.0f}"]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _sentence(where: Mapping[str, Any], rows: Sequence[Row]) -> str:
    samples = max(row["samples"] for row in rows if row["task"] in (*RULER, "RULER"))
    return (
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, vLLM {where['vllm']}, commit "
        f"{where['commit']}; {samples} samples; {where.get('seconds', '?')} s."
    )


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    drawing = stream.getvalue()
    return drawing[drawing.index("<svg") :]
