# SPDX-License-Identifier: Apache-2.0
"""An explanation as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_segreuse.explain.client import Explanation

REASONS = {
    "last_token": "the last token is always computed",
    "shorter_than_block": "shorter than a KV block",
    "computed_now": "being computed for another request right now",
    "evicted": "was known, and has been evicted",
    "too_deep": "only computed behind reused KV (max_provenance_depth)",
    "unknown": "not seen in this namespace",
    "not_cached": "not cached under its exact name",
}
_COLOURS = {"prefix": "blue", "segment": "green", "new": "yellow"}


def table(explanation: Explanation) -> Group:
    """One line per stretch, and what the request comes to."""
    shown = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for name in ("from", "tokens"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("source", no_wrap=True)
    shown.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    texts = explanation.texts or [""] * len(explanation.stretches)
    for stretch, text in zip(explanation.stretches, texts, strict=True):
        shown.add_row(
            f"{stretch['start']:,}",
            f"{stretch['tokens']:,}",
            Text(_source(stretch), style=_COLOURS[stretch["source"]]),
            Text(" ".join(text.split())),
        )
    return Group(shown, Text(), Text(verdict(explanation.report)))


def verdict(report: Mapping[str, Any]) -> str:
    """What would be reused, or why nothing would, in a sentence."""
    total = report["prompt_tokens"]
    found = report["observed"] or report
    if found["reused_tokens"]:
        share, work = found["reused_tokens"] / total, found["computed_share"]
        would = "would be" if report["observed"] else "were"
        return (
            f"{found['reused_tokens']:,} of {total:,} tokens ({share:.0%}) {would} reused with "
            f"{report['policy']}, {found['recomputed_tokens']:,} of these computed again: "
            f"{work:.0%} of the work behind the prefix."
        )
    return f"Nothing is reused of {total:,} tokens: {report['bypass_reason']}."


def _source(stretch: Mapping[str, Any]) -> str:
    if stretch["source"] == "segment":
        moved = stretch["start"] - stretch["position"]
        return f"segment, moved by {moved:+,}" if moved else "segment, in its place"
    if stretch["source"] == "new":
        return f"new: {REASONS.get(stretch['reason'], stretch['reason'])}"
    return "prefix cache"
