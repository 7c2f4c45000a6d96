# SPDX-License-Identifier: Apache-2.0
"""What an explanation says, in words: for the terminal and for pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segreuse_extras.viewer.asking import EditTexts

REASONS = {
    "last_token": "the last token is always computed",
    "shorter_than_block": "shorter than a KV block",
    "computed_now": "being computed for another request right now",
    "evicted": "was known, and has been evicted",
    "too_deep": "only computed behind reused KV (max_provenance_depth)",
    "other_adapter": "cached for another LoRA adapter only",
    "unknown": "not seen in this namespace",
    "not_worth_it": "found, and computed all the same: reuse would save too little",
    "other_context": "known, but not computed behind the text in front of it here (context=same)",
    "no_free_blocks": "found, but there was no room to hold its blocks beside the request's",
    "not_cached": "not cached under its exact name",
    "new_image": "begins with an image that is not reused wholly",
}


REUSED = {"segment": "segment", "similar": "similar text"}
"""Sources of reused stretches."""


def source(stretch: Mapping[str, Any]) -> str:
    """Where a stretch comes from."""
    if stretch["source"] in REUSED:
        moved = stretch["start"] - stretch["position"]
        where = f"moved by {moved:+,}" if moved else "in its place"
        rejected = ", rejected by the test" if stretch.get("rejected") else ""
        return f"{REUSED[stretch['source']]}, {where}{rejected}"
    if stretch["source"] == "new":
        return f"new: {REASONS.get(stretch['reason'], stretch['reason'])}"
    return "prefix cache"


def num_recomputed(stretch: Mapping[str, Any]) -> int | None:
    """Tokens of a stretch that are computed again; None for what is not reused, or not known."""
    runs = stretch.get("recomputed")
    return None if runs is None else sum(tokens for _, tokens in runs)


def recomputed(stretch: Mapping[str, Any]) -> str:
    """The share of a stretch that is computed again; "" for what is not reused, or not known."""
    tokens = num_recomputed(stretch)
    return "" if tokens is None else f"{tokens / stretch['tokens']:.0%}"


def verdict(report: Mapping[str, Any]) -> str:
    """What would be reused, or why nothing would; and where the prompt was edited."""
    edit = report.get("edit")
    if edit is None:
        return _reuse(report)
    return (
        f"{_reuse(report)} The prompt departs from an earlier one at token {edit['at']:,}: "
        f"{edit['gone_tokens']:,} tokens that stood there are gone, {edit['new_tokens']:,} are "
        f"new, and {edit['found_tokens']:,} behind them were found again."
    )


def edited(edit: EditTexts | None) -> str:
    """The text where a prompt was edited; "" if it is not known."""
    if edit is None:
        return ""
    parts = ("In front", edit.before), ("Gone", edit.gone), ("New", edit.new)
    shown = [*parts, ("Behind", edit.behind)]
    return " ".join(
        f"{name}: {json.dumps(text, ensure_ascii=False)}." for name, text in shown if text
    )


def _reuse(report: Mapping[str, Any]) -> str:
    total = report["prompt_tokens"]
    observed = report.get("observed")
    found = observed or report
    if found["reused_tokens"]:
        share, work = found["reused_tokens"] / total, found["computed_share"]
        would = "would be" if observed else "were"
        return (
            f"{found['reused_tokens']:,} of {total:,} tokens ({share:.0%}) {would} reused with "
            f"{report['policy']}, {found['recomputed_tokens']:,} of these computed again: "
            f"{work:.0%} of the work behind the prefix."
        )
    why = report["bypass_reason"]
    if prefix := report["prefix_tokens"]:
        return (
            f"{prefix:,} of {total:,} tokens are found by the prefix cache; of the rest nothing is "
            f"reused: {why}."
        )
    return f"Nothing is reused of {total:,} tokens: {why}."
