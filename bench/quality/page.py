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
from bench.quality.tasks import TASKS, Example

_MARKS = "o^svDP*Xhp<"
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:78rem;margin:2rem auto;padding:0 1rem}
.wide{overflow-x:auto;border:1px solid #ddd;margin:1rem 0}.wide svg{min-width:44rem}
table{border-collapse:collapse;font-size:.85rem;width:100%}
td,th{padding:.2rem .5rem;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{text-align:left;position:sticky;left:0;background:#fff}
tr:nth-child(even) td{background:#f4f4f4}th{border-bottom:2px solid #444;vertical-align:bottom}
td small,th small{display:block;font-weight:400}svg{max-width:100%;height:auto;display:block}
small{color:#555}"""
_NOTES = """<p><small>Accuracy, below it its 95 % interval: Clopper and Pearson's for shares, else
one by betting (Waudby-Smith and Ramdas). Difference: policy less full prefill on the same
examples, with its interval; d: how many of the n examples differ. p: two-sided, exact over all
signs of the differences, at least 2<sup>1-d</sup>; Holm: corrected for all {comparisons}
comparisons of this run. Equivalent: the interval lies within &plusmn;{margin}; lower or higher:
corrected p below 0.05; open: neither was shown. KL: of the first answer token from full prefill,
in nats, with a bootstrap interval (BCa). Work: share of (token, layer) pairs computed. TTFT:
median.</small></p>"""


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
    rows, summary = result["rows"], result["summary"]
    head = '<meta charset=utf-8><meta name=viewport content="width=device-width">'
    parts = [
        f"<!doctype html><html lang=en>{head}<title>Quality of KV reuse</title>",
        f"<style>{STYLE}</style><h1>Quality of KV reuse</h1>",
        f"<p>{html.escape(_sentence(where, result))}</p>",
        "<h2>Accuracy</h2>",
        accuracy_table(rows),
        "<h2>Against full prefill</h2>",
        *(comparison_table(rows, task) for task in _compared(rows)),
        _NOTES.format(**{name: summary.get(name, "?") for name in ("comparisons", "margin")}),
        "<h2>Quality against computed work</h2>",
        svg(pareto(rows)),
        "<h2>Which tokens were computed, at which layers</h2>",
        f"<p>One example of {html.escape(example.task)}, {html.escape(example.kind)}. "
        "Lines: borders of documents.</p>",
        svg(layers(example, computed)),
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


def accuracy_table(rows: Sequence[Row]) -> str:
    """Tasks down, with n, and policies across; each cell has its interval below."""
    cells = {(row["task"], row["policy"]): row for row in rows}
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [cells[task, policy] for policy in policies]
        name = f"{html.escape(task)}<small>n = {mine[0]['samples']}</small>"
        lines.append([name, *(with_interval(row, "accuracy") for row in mine)])
    return table_of(["task", *map(html.escape, policies)], lines)


def comparison_table(rows: Sequence[Row], task: str) -> str:
    """Every policy against full prefill on one task."""
    names = ["accuracy", "difference", "d", "p", "Holm", "verdict", "KL", "work", "TTFT, ms"]
    mine = [row for row in rows if row["task"] == task]
    lines = []
    for row in mine:
        against = ["", "", "", "", "", ""]
        if row.get("difference") is not None:
            against = [
                with_interval(row, "difference", sign="+"),
                str(row["differing"]),
                p_text(row["p_against_full"]),
                p_text(row["p_holm"]),
                html.escape(row["verdict"]),
                with_interval(row, "first_token_kl", "kl"),
            ]
        last = [f"{row['work']:.3f}", f"{row['ttft_ms']:.0f}"]
        accuracy = with_interval(row, "accuracy")
        lines.append([html.escape(row["policy"]), accuracy, *against, *last])
    return table_of([f"{html.escape(task)}<small>n = {mine[0]['samples']}</small>", *names], lines)


def _compared(rows: Sequence[Row]) -> list[str]:
    """Tasks with a table of comparisons: the RULER tasks together first, kinds of a task not."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    whole = [task for task in tasks if task == "RULER" or task in TASKS]
    return sorted(whole, key=lambda task: task != "RULER")


def with_interval(row: Row, key: str, interval: str | None = None, sign: str = "") -> str:
    """A figure, and below it from where to where; `accuracy` has `low` and `high`."""
    prefix = "" if key == "accuracy" else f"{interval or key}_"
    low, high = row[f"{prefix}low"], row[f"{prefix}high"]
    figure = f"{row[key]:{sign}.3f}"
    if low is None:
        return figure
    return f"{figure}<small>{low:{sign}.3f} to {high:{sign}.3f}</small>"


def p_text(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def table_of(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in a box of its own, which scrolls where the window is narrow."""
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    rows += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines]
    return "\n".join(["<div class=wide tabindex=0><table>", *rows, "</table></div>"])


def _sentence(where: Mapping[str, Any], result: SuiteResult) -> str:
    summary = result["summary"]
    return (
        f"{summary.get('model', '?')}, {summary.get('seeds', '?')} seeds; {where['date']}, "
        f"{where['cpu']}, {where['cores']} cores, vLLM {where['vllm']}, commit {where['commit']}; "
        f"{where.get('seconds', '?')} s."
    )


def svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    drawing = stream.getvalue()
    return f"<div class=wide tabindex=0>{drawing[drawing.index('<svg') :]}</div>"
