# SPDX-License-Identifier: Apache-2.0
"""An estimate without an engine as a person reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from segreuse_tools.estimate.gain import PREFIX, UNLIMITED_TOKENS, Gain, SizeRow
from segreuse_tools.estimate.request_log import Reason
from segreuse_tools.estimate.traces.formats import Format

MOST_REASONS = 10
"""Why lines are left out, as far as it is printed."""

_WIDTH = 100


def print_gain(gain: Gain) -> None:
    """The log, what is known by size of the cache, the work that is left, and what was assumed."""
    # A file or a pipe has no width: tables must not be folded there.
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, highlight=False, markup=False, soft_wrap=False)
    for line in _facts(gain):
        console.print(line, soft_wrap=True)
    console.print()
    console.print("known prompt tokens, by the tokens of KV that a cache holds")
    console.print(_known(gain))
    for line in _legend(gain):
        console.print(line, soft_wrap=True)
    console.print()
    console.print("work that is left")
    console.print(_work(gain))
    for line in _remarks(gain):
        console.print(line, soft_wrap=True)


def size_name(tokens: int | None) -> str:
    """As 300K, 1M or unlimited."""
    if tokens is None:
        return "unlimited"
    for unit, name in ((1_000_000, "M"), (1_000, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit:,}{name}"
    return f"{tokens:,}"


def _facts(gain: Gain) -> Iterator[str]:
    yield (
        f"log       {gain.format}: {gain.requests:,} requests, {gain.prompt_tokens:,} prompt "
        f"tokens (median about {gain.median_tokens:,})"
    )
    yield from _reasons("left out", gain.left_out)
    yield from _reasons("sorted", gain.out_of_order)
    engines = "1 engine" if gain.engines == 1 else f"{gain.engines} engines, by {gain.router}"
    tier = f", and a tier of {size_name(gain.tier_tokens)} tokens" if gain.tier_tokens else ""
    yield from _turns(gain)
    yield f"caches    blocks of {gain.block_size} tokens, {engines}{tier}"


def _turns(gain: Gain) -> Iterator[str]:
    turns = gain.turns
    if not turns.later:
        return
    others = turns.later - turns.appended - turns.edited
    yield (
        f"turns     {turns.later:,} prompts have one before in their session: {turns.appended:,} "
        f"add to it, {turns.edited:,} edit it, {others:,} do neither"
    )
    if turns.edited:
        behind, kept = turns.behind_tokens, turns.kept_tokens
        yield (
            f"          behind edits stand {behind:,} tokens, {behind / gain.prompt_tokens:.1%} of "
            "all prompt tokens;"
        )
        yield f"          {kept / behind:.1%} of them stood in the prompt before, and are no prefix"


def _reasons(what: str, reasons: tuple[Reason, ...]) -> Iterator[str]:
    for reason in reasons[:MOST_REASONS]:
        yield f"{what:<10}{reason}"
    if others := reasons[MOST_REASONS:]:
        requests = sum(reason.requests for reason in others)
        yield f"{what:<10}{requests:,} for {len(others):,} other reasons (--json has all)"


def _table(gain: Gain) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for row in gain.sizes:
        table.add_column(size_name(row.cache_tokens), justify="right")
    return table


def _known(gain: Gain) -> Table:
    table = _table(gain)
    named = (
        ("prefix caching", "prefix_share"),
        ("  more in the tier", "tier_prefix_share"),
        ("any position, this plugin", "any_position_share"),
        ("  more in the tier", "tier_any_position_share"),
        ("whole components: prefix", "whole_prefix_share"),
        ("  passages reordered", "whole_reordered_share"),
        ("  any position", "whole_any_position_share"),
    )
    for name, field in named:
        shares = [getattr(row, field) for row in gain.sizes]
        if any(share is not None for share in shares):
            table.add_row(name, *map(_percent, shares))
    return table


def _work(gain: Gain) -> Table:
    table = _table(gain)
    for number, first in enumerate(gain.sizes[0].policies):
        rows = [size.policies[number] for size in gain.sizes]
        cells = []
        for row in rows:
            times = row.first_token_s
            shown = "" if times is None else f"  {_ms(times[0])} / {_ms(times[1])}"
            cells.append(f"{_percent(row.computed_share)}{shown}")
        table.add_row(first.policy, *cells)
    if gain.sizes[0].whole_computed_share is not None:
        shares = [_percent(size.whole_computed_share) for size in gain.sizes]
        name = next(it.policy for it in gain.sizes[0].policies if it.policy != PREFIX)
        table.add_row(f"whole components, {name}", *shares)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _legend(gain: Gain) -> Iterator[str]:
    yield "this plugin: prefix hits and segments, which it copies, so that each prompt has its own;"
    if gain.sizes[0].whole_prefix_share is not None:
        yield "whole components: each held once, which bounds what reuse at any position knows;"
    yield "work: (token, layer) pairs, in percent of those of all prompt tokens."


def _remarks(gain: Gain) -> Iterator[str]:
    if gain.sizes[0].policies[0].first_token_s is not None:
        yield "times: of the prefill, half / 90 % of the prompts; waiting and copying not counted."
    if gain.format == Format.HASH_IDS:
        yield (
            "In Mooncake's traces an id stands for a block and all in front of it: text that moves "
            "is not seen."
        )
    if gain.format == Format.WEKA:
        yield "Ids are of one conversation: what conversations share is not seen."
    for row in gain.sizes:
        yield from _row_remarks(row)
    if _is_mostly_prefix(gain):
        yield (
            "Nearly all that is known is a prefix: reuse at any position adds nothing here. A "
            "second tier, or a larger cache, keeps prefixes for longer."
        )


def _row_remarks(row: SizeRow) -> Iterator[str]:
    if row.too_long:
        name = size_name(row.cache_tokens)
        yield f"{row.too_long:,} requests do not fit into {name} tokens, and find nothing there."
    if row.is_capped:
        yield f"unlimited: the largest that is tried, {UNLIMITED_TOKENS:,} tokens, was full."


def _is_mostly_prefix(gain: Gain) -> bool:
    last = gain.sizes[-1]
    best = max(last.any_position_share, last.whole_any_position_share or 0.0)
    return best - last.prefix_share < 0.02
