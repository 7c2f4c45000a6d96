# SPDX-License-Identifier: Apache-2.0
"""An estimate as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from segreuse_tools.estimate.comparison import Cache, Estimate, Row

MOST_REASONS = 10
"""Why lines are left out, as far as it is printed."""

_HEADER = ("", "prefix", "reused", "recomputed", "computed", "requests", "evicted")
_LEGEND = (
    "prefix: found by prefix caching; reused: segments, at any position; recomputed: of these;",
    "computed: work that is left, of (token, layer) pairs. All in percent of the prompt tokens.",
    "requests: that reuse segments; evicted: cached KV blocks.",
)


def as_text(estimate: Estimate, default: str) -> str:
    """The log, the cache, a line for each replay, and why requests were bypassed.

    Args:
        default: policy of a server with these options.
    """
    parts = (_facts(estimate), _table(estimate, default), (*_LEGEND, *_remarks(estimate, default)))
    return "\n\n".join("\n".join(part) for part in parts)


def _facts(estimate: Estimate) -> Iterator[str]:
    names = "namespace" if estimate.namespaces == 1 else "namespaces"
    yield (
        f"log       {_count(estimate.requests, 'request')}, {estimate.prompt_tokens:,} prompt "
        f"tokens (median {estimate.median_tokens:,}), {estimate.with_extra_keys:,} with extra "
        f"keys, {estimate.namespaces:,} {names}"
    )
    shown = estimate.left_out[:MOST_REASONS]
    for reason in shown:
        yield f"left out  {reason}"
    if others := estimate.left_out[len(shown) :]:
        requests = _count(sum(reason.requests for reason in others), "request")
        yield f"left out  {requests} for {_count(len(others), 'other reason')} (--json has all)"
    if estimate.concurrency is None:
        yield "order     at the logged times"
    else:
        yield f"order     {estimate.concurrency:,} at a time"
    yield f"KV cache  {_cache(estimate.cache)}"


def _cache(cache: Cache) -> str:
    size = "" if cache.gib is None else f", {cache.gib:,.1f} GiB on each device"
    why = "" if cache.is_given else ": as large as the log needs"
    if cache.is_capped:
        why = ": the largest that is tried; the log may need more: give --kv-gib"
    tokens = cache.num_blocks * cache.block_size
    return (
        f"{cache.num_blocks:,} blocks of {cache.block_size} tokens ({tokens:,} tokens{size}){why}"
    )


def _table(estimate: Estimate, default: str) -> list[str]:
    rows = [_HEADER, *(_cells(row, estimate.prompt_tokens, default) for row in estimate.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if column else cell.ljust(width)


def _cells(row: Row, prompt_tokens: int, default: str) -> tuple[str, ...]:
    def share(tokens: float) -> str:
        return f"{tokens / prompt_tokens:.1%}"

    prefix, computed = share(row.prefix_tokens), share(row.computed_tokens)
    evicted = f"{row.evicted_blocks:,}"
    if row.policy is None:
        return ("prefix caching alone", prefix, "", "", computed, "", evicted)
    marks = " (default)" if row.policy == default else ""
    return (
        f"{row.policy}{marks}{' *' if row.is_planned else ''}",
        *(prefix, share(row.reused_tokens), share(row.recomputed_tokens), computed),
        *(f"{row.reusing_requests:,}", evicted),
    )


def _remarks(estimate: Estimate, default: str) -> Iterator[str]:
    if any(row.is_planned for row in estimate.rows):
        yield (
            "* planned: a pass may choose fewer tokens (peaks), or compute all of them (max_drift)."
        )
    if estimate.has_tier:
        yield "The second tier is not replayed: what is evicted counts as lost."
    for row in estimate.rows:
        if row.preemptions:
            name = row.policy or "prefix caching alone"
            yield f"{name}: running requests lost their blocks {_count(row.preemptions, 'time')}"
    shown = next((row for row in estimate.rows if row.policy == default), estimate.rows[-1])
    if shown.bypassed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in shown.bypassed.items())
        yield f"bypassed with {shown.policy}: {reasons}"
    if not estimate.with_extra_keys:
        yield (
            "No request names extra_keys, so nothing would be looked up: --extra-keys NAME assumes "
            "one namespace for all."
        )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
