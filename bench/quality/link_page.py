# SPDX-License-Identifier: Apache-2.0
"""A run of `bench link` as one HTML page: tables, and accuracy over work."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.harness import Row, SuiteResult
from bench.quality import page
from bench.quality.link_figures import ALL

_NOTES = """<p><small>Accuracy, below it its 95 % interval. Difference: the arm less full prefill of
the lab's model on the same examples, with its interval. Holm: corrected for all {comparisons}
comparisons of this run. Equivalent: the interval lies within &plusmn;0.02. Work: share of (token,
layer) pairs computed for the prompt, documents being known. TTFT: median.</small></p>"""


def write(file: Path, where: Mapping[str, Any], result: SuiteResult) -> None:
    """Write the page."""
    mpl.rcParams["svg.hashsalt"] = "link"  # the same figures give the same file
    rows = [row for row in result["rows"] if "task" in row]
    summary = result["summary"]
    told = (
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, vLLM {where['vllm']}, commit "
        f"{where['commit']}; seeds: {summary['seeds']}; n = {summary['samples']} for each arm."
    )
    head = '<meta charset=utf-8><meta name=viewport content="width=device-width">'
    parts = [
        f"<!doctype html><html lang=en>{head}<title>Models trained for reuse</title>",
        f"<style>{page.STYLE}</style><h1>Models trained on documents computed alone</h1>",
        f"<p>{html.escape(told)}</p><h2>Accuracy</h2>",
        page.accuracy_table(rows),
        "<h2>Against full prefill</h2>",
        comparison_table([row for row in rows if row["task"] == ALL]),
        _NOTES.format(comparisons=summary["comparisons"]),
        "<h2>Accuracy against computed work</h2>",
        page.svg(over_work([row for row in rows if row["task"] == ALL])),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts) + "\n", encoding="utf-8")


def comparison_table(rows: Sequence[Row]) -> str:
    """Every arm against full prefill."""
    names = ["arm", "accuracy", "difference", "d", "Holm", "verdict", "work", "TTFT, ms"]
    lines = []
    for row in rows:
        against = ["", "", "", ""]
        if "difference" in row:
            against = [
                page.with_interval(row, "difference", sign="+"),
                str(row["differing"]),
                page.p_text(row["p_holm"]),
                html.escape(row["verdict"]),
            ]
        ttft = "" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f}"
        last = [f"{row['work']:.3f}", ttft]
        accuracy = page.with_interval(row, "accuracy")
        lines.append([html.escape(row["policy"]), accuracy, *against, *last])
    return page.table_of(names, lines)


def over_work(rows: Sequence[Row]) -> Figure:
    """Accuracy over work, with intervals."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, mark in zip(rows, cycle("o^svDP*X"), strict=False):
        error = [[row["accuracy"] - row["low"]], [row["high"] - row["accuracy"]]]
        axes.errorbar(row["work"], row["accuracy"], error, fmt=mark, capsize=3, label=row["policy"])
    axes.set(xlabel="computed work, share of full prefill", ylabel="accuracy", xscale="log")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure
