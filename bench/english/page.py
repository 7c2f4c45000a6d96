# SPDX-License-Identifier: Apache-2.0
"""A run of `bench english` as one HTML page: what it comes to, a plot, tables by donors."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from bench.english.arms import FULL
from bench.english.figures import in_cells
from bench.harness import Row, SuiteResult
from bench.quality.page import STYLE, p_text, svg, table_of, with_interval

_MARKS = "o^svDP*Xhp<"
_MORE_STYLE = """.lower{background:#fbdcd6}
h2{margin-top:2.5rem}dl{display:grid;grid-template-columns:max-content auto;gap:.1rem 1rem}
dt{font-weight:600}dd{margin:0}"""
_DONORS = {
    "alone": "each document was computed by itself",
    "siblings": "each document was computed behind two others of its set",
    "reversed": "all documents were computed in one other prompt, in the opposite order",
    "stream": "documents were computed in three earlier prompts with other questions",
    "knowledge": "documents were ingested by a knowledge base as it is shipped",
}
_KEYS = {
    "default_over_full": "default over full, siblings and reversed",
    "default_less_full_low": "difference of accuracy, at least",
    "default_less_full_high": "and at most",
    "default_counted": "answers that count",
    "default_examples": "examples that they are of",
    "default_work": "its work",
    "alone_over_full": "default over full, alone",
    "alone_less_full_low": "difference of accuracy, at least",
    "alone_less_full_high": "and at most",
    "alone_counted": "answers that count",
    "alone_work": "its work",
    "stream_over_full": "default over full, stream",
    "stream_less_full_low": "difference of accuracy, at least",
    "stream_less_full_high": "and at most",
    "stream_counted": "answers that count",
    "stream_work": "its work",
    "kb_over_full": "default over full, knowledge bases",
    "kb_less_full_low": "difference of accuracy, at least",
    "kb_less_full_high": "and at most",
    "kb_counted": "answers that count",
    "kb_work": "its work",
    "harm": "cells where the default answers fewer than shift",
    "harm_kl": "cells where the default is further from full prefill than shift",
    "kl_p90": "first token's KL, 90th percentile",
    "kl_p90_of": "of the policy",
    "kl_p90_work": "its work",
    "in_full": "share of its requests computed in full",
    "drift_rank_correlation": "rank correlation of drift and KL",
    "tasks_by_kl_only": "tasks by KL only",
    "samples_per_cell": "examples of each task and kind of donors, at least",
}
_NOTES = """<p><small>Accuracy: share of the answer's parts that were given, and below it its 95 %
interval (Clopper and Pearson's for shares, else one by betting); a cell is red where it is
significantly below full prefill on the same examples (two-sided, corrected by Holm's method for all
{comparisons} cells of this run). KL: divergence from full prefill over the whole vocabulary, in
nats: of the first token, and the mean along full prefill's answer (32 tokens at most, its tokens
forced). Agreement: share of these tokens that would have been chosen. Work: share of (token, layer)
pairs computed. TTFT: median. Of tasks that full prefill answers to less than half no accuracy is
shown. Over full: right answers of all tasks together, as a share of full prefill's. Answers to the
even examples of a task count where full prefill answers at least half of the odd ones, and the
other way round.</small></p>"""


def write(file: Path, where: Mapping[str, Any], result: SuiteResult) -> None:
    """Write the page.

    Args:
        file: where to.
        where: environment of the run.
        result: its rows and summary.
    """
    mpl.rcParams["svg.hashsalt"] = "english"  # the same figures give the same file
    rows, summary = in_cells(result), result["summary"]
    head = '<meta charset=utf-8><meta name=viewport content="width=device-width">'
    title = "KV reuse on English text"
    parts = [
        f"<!doctype html><html lang=en>{head}<title>{title}</title>",
        f"<style>{STYLE}{_MORE_STYLE}</style><h1>{title}</h1>",
        f"<p>{html.escape(_sentence(where, summary))}</p>",
        summary_list(summary),
        "<h2>Right answers and divergence against computed work</h2>",
        svg(frontier(result["rows"])),
    ]
    for donors in dict.fromkeys(row["donors"] for row in rows):
        mine = [row for row in rows if row["donors"] == donors]
        parts += [
            f"<h2>Donors: {html.escape(donors)}</h2><p>{_DONORS.get(donors, '')}.</p>",
            cells_table(mine),
        ]
    parts.append(_NOTES.format(comparisons=summary.get("comparisons", "?")))
    parts.append("<h2>The default by number of documents</h2>")
    parts.append(documents_table([row for row in result["rows"] if "documents" in row]))
    parts.append("<h2>The default with a bound on drift</h2>")
    parts.append(
        "<p>What is above it is computed in full behind its pass; made of the same answers.</p>"
    )
    parts.append(bounds_table([row for row in result["rows"] if "max_drift" in row]))
    parts.append("<h2>RULER's tasks by length</h2>")
    parts.append(lengths_table([row for row in result["rows"] if "kind" in row]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts) + "\n", encoding="utf-8")


def summary_list(summary: Mapping[str, Any]) -> str:
    """The figures that matter, by what they mean."""
    shown = "".join(
        f"<dt>{html.escape(text)}</dt><dd>{html.escape(_value(summary[key]))}</dd>"
        for key, text in _KEYS.items()
        if key in summary
    )
    return f"<dl>{shown}</dl>"


def cells_table(rows: Sequence[Row]) -> str:
    """Tasks down and policies across, for one kind of donors."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells = {(row["task"], row["policy"]): row for row in rows}
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        first = next(row for row in rows if row["task"] == task)
        name = f"{html.escape(task)}<small>n = {first['samples']}</small>"
        lines.append([name, *(_cell(cells.get((task, policy))) for policy in policies)])
    return table_of(["task", *map(html.escape, policies)], lines)


def documents_table(rows: Sequence[Row]) -> str:
    """A line for each kind of donors and number of documents."""
    names = ["donors", "documents", "n", "answers that count", "full", "default", "default - full"]
    names += ["shift", "drift", "KL", "answer KL", "work"]
    lines = [
        [
            *(html.escape(str(row[key])) for key in ("donors", "documents", "samples", "counted")),
            *(_number(row.get(key), 2) for key in ("full", "default")),
            f"{row['less_full_low']:+.2f} to {row['less_full_high']:+.2f}"
            if row["counted"]
            else "",
            *(_number(row.get(key), 2) for key in ("shift", "drift")),
            *(_number(row[key], 3) for key in ("first_kl", "answer_kl", "work")),
        ]
        for row in rows
    ]
    return table_of(names, lines)


def bounds_table(rows: Sequence[Row]) -> str:
    """A line for each kind of donors and bound."""
    if not rows:
        return "<p>No drift was reported.</p>"
    names = [
        "donors",
        "max_drift",
        "n",
        "in full",
        "work",
        "over full",
        "KL",
        "its 90th percentile",
    ]
    lines = [
        [
            *(html.escape(str(row[key])) for key in ("donors", "max_drift", "samples")),
            *(_number(row[key], 2) for key in ("in_full", "work", "over_full")),
            *(_number(row[key], 3) for key in ("first_kl", "kl_p90")),
        ]
        for row in rows
    ]
    return table_of(names, lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def lengths_table(rows: Sequence[Row]) -> str:
    """A line for each task, length, kind of donors and policy; empty without lengths."""
    if not rows:
        return "<p>Not asked at several lengths.</p>"
    names = ["task", "tokens", "donors", "policy", "n", "accuracy", "KL", "answer KL", "work"]
    lines = [
        [
            *(html.escape(str(row[key])) for key in ("task", "kind", "donors", "policy")),
            str(row["samples"]),
            with_interval(row, "accuracy") if row["able"] else "",
            *(f"{row[key]:.3f}" if key in row else "" for key in ("first_kl", "answer_kl")),
            f"{row['work']:.3f}",
        ]
        for row in rows
    ]
    return table_of(names, lines)


def frontier(rows: Sequence[Row]) -> Figure:
    """By donors, all tasks together: right answers over full prefill's against work, and below them
    mean divergence; a point is a policy."""
    rows = [row for row in rows if "pooled" in row]
    donors = list(dict.fromkeys(row["donors"] for row in rows))
    policies = dict.fromkeys(row["pooled"] for row in rows)
    figure = Figure(figsize=(3.1 * len(donors) + 1.8, 5.6), layout="constrained")
    axes = np.atleast_2d(figure.subplots(2, len(donors), sharey="row", squeeze=False))
    for column, name in enumerate(donors):
        for policy, mark in zip(policies, cycle(_MARKS), strict=False):
            points = [row for row in rows if (row["donors"], row["pooled"]) == (name, policy)]
            for at, figure_of in zip(axes[:, column], ("over_full", "answer_kl"), strict=True):
                known = [row for row in points if row[figure_of] is not None]
                at.plot(
                    [row["work"] for row in known],
                    [row[figure_of] for row in known],
                    mark,
                    label=policy,
                )
        axes[0, column].axhline(1, color="grey", linewidth=1)
        axes[0, column].set(title=name)
        axes[1, column].set(xlabel="computed work")
        for at in axes[:, column]:
            at.set(xlim=(0, 1.03))
            at.grid(alpha=0.3)
    axes[0, 0].set(ylabel="right answers over full prefill's")
    axes[0, 0].set_ylim(bottom=0)
    axes[1, 0].set(ylabel="KL along the answer, nats")
    axes[1, 0].set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    lines = []
    if row["able"]:
        accuracy = with_interval(row, "accuracy")
        lower = row.get("verdict", "").startswith("lower")
        lines.append(f"<div class=lower>{accuracy}</div>" if lower else accuracy)
    if row["policy"] != FULL:
        if "p_holm" in row:
            lines.append(f"<small>p {p_text(row['p_holm'])}</small>")
        lines.append(f"<small>KL {row['first_kl']:.3f}, {row['answer_kl']:.3f}</small>")
        lines.append(f"<small>agree {row['agreement']:.2f}, work {row['work']:.2f}</small>")
    lines.append(f"<small>{row['ttft_ms']:.0f} ms</small>")
    return "".join(lines)


def _value(value: Any) -> str:
    if value is None:
        return "not measured"
    if value == "":
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _sentence(where: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    return (
        f"{summary.get('model', '?')}, {summary.get('seeds', '?')} seeds, "
        f"{'with' if where.get('chat_template') else 'without'} chat template; "
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, vLLM {where['vllm']}, commit "
        f"{', '.join(where.get('commits', [str(where['commit'])]))}."
    )
