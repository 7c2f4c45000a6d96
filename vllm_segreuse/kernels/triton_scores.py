# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803 (compile-time arguments of kernels are written in capitals)
"""`token_scores` in Triton: column sums, or peaks, of attention weights that are never all there.

First the log-sum-exp of every row (query and head), tile by tile as in attention, but without
values. Then, tile of keys by tile of keys, the logits again: a weight is the exponential of logit
minus log-sum-exp, and its column is gathered where it is. Everything is added in a fixed order.
"""

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_segreuse.kernels import triton_attention
from vllm_segreuse.kernels.arguments import (
    check_blocks,
    check_last,
    check_positions,
    check_weights,
)
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides
from vllm_segreuse.kernels.triton_addresses import load_tokens
from vllm_segreuse.kernels.triton_attention import capped, check_inputs, exponentials, with_sinks
from vllm_segreuse.kernels.triton_formats import in_type, readable
from vllm_segreuse.kernels.triton_schedule import (
    MAX_SPLITS,
    Tuning,
    default_tuning,
    heads_per_kv_head,
    splits_to_fill,
)

_JOINED_ROWS = 128


def supports(layout: PageLayout, dtype: torch.dtype, queries: torch.dtype | None = None) -> bool:
    """Whether `token_scores` takes pages of this layout and dtype, and queries of theirs: tiles are
    those of attention."""
    return triton_attention.supports(layout, dtype, queries)


def token_scores(
    query: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    block_ids: torch.Tensor,
    num_tokens: int,
    scale: float,
    highest: bool = False,
    *,
    last: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    splits: int | None = None,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """As `reference.token_scores`; in addition:

    Args:
        splits: among how many programs to divide keys, then queries; by default what fills the
            machine.
        tuning: sizes of one program, instead of `default_tuning`.

    Returns:
        As there; the same for the same input on the same device.

    Raises:
        ValueError: the arguments are not as described.
    """
    queries, heads, head_size = query.shape
    kv_heads, device = keys.shape[0], query.device
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}; expected 0 or more")
    check_last(last, highest)
    rows = () if last is None else (2,)
    if not queries or not num_tokens:
        return torch.zeros(*rows, num_tokens, device=device)
    check_inputs(query, pages, keys, block_ids, scale)
    check_positions(query, positions)
    check_weights(query, 0, sinks, soft_cap)
    check_blocks(block_ids, triton.cdiv(num_tokens, keys.shape[1]), pages)
    group = heads_per_kv_head(heads, kv_heads)
    tuning = tuning or default_tuning(query.dtype, head_size, queries, group)
    if tuning.rows < group:
        raise ValueError(f"tiles of {tuning.rows} rows cannot hold {group} heads; give more rows")
    per_tile = tuning.rows // group
    row_tiles, key_tiles = triton.cdiv(queries, per_tile), triton.cdiv(num_tokens, tuning.keys)
    inputs = (query, positions, readable(pages), block_ids)
    numbers = (
        query.stride(0),
        query.stride(1),
        pages.stride(0),
        queries,
        num_tokens,
        scale * math.log2(math.e),
        soft_cap * math.log2(math.e),
    )
    sizes = {
        "KEYS": keys,
        "CAPPED": soft_cap > 0,
        "GROUP": group,
        "ROWS": tuning.rows,
        "STEP": tuning.keys,
        "num_warps": tuning.warps,
        "num_stages": tuning.stages,
        "enable_fp_fusion": True,
    }

    shares = splits or splits_to_fill(row_tiles * kv_heads, num_tokens, device, tuning.resident)
    lse = torch.empty(shares, queries, heads, device=device)
    _row_sums[(row_tiles * kv_heads, shares)](
        lse,
        query if sinks is None else sinks,
        *inputs,
        *numbers,
        shares,
        SINKS=sinks is not None,
        **sizes,
    )
    if shares > 1:
        parts, lse = lse, torch.empty(queries, heads, device=device)
        _join_sums[(triton.cdiv(queries * heads, _JOINED_ROWS),)](
            lse,
            parts,
            queries * heads,
            shares,
            ROWS=_JOINED_ROWS,
            MAX_SPLITS=max(MAX_SPLITS, triton.next_power_of_2(shares)),
            enable_fp_fusion=True,
        )

    shares = splits or splits_to_fill(
        key_tiles * kv_heads, queries * group, device, tuning.resident
    )
    mass = torch.empty(*rows, shares * kv_heads, num_tokens, device=device)
    late_from = queries - (last or 0)
    _columns[(key_tiles * kv_heads, shares)](
        mass,
        lse,
        *inputs,
        *numbers,
        shares,
        late_from,
        HIGHEST=highest,
        LATE=last is not None,
        **sizes,
    )
    return mass.amax(-2) if highest else mass.sum(-2)


# Numbers that change from call to call are not compiled in, not even as multiples of 16; nor is
# whether a row of the block tables begins at such an address.
@triton.jit(
    do_not_specialize=["num_queries", "num_tokens", "splits"],
    do_not_specialize_on_alignment=["block_table", "positions"],
)
def _row_sums(
    lse,  # float32 [splits, queries, heads], base 2, written
    sinks,  # [heads], not read without `SINKS`
    query,
    positions,
    pages,
    block_table,
    query_stride,
    query_head_stride,
    page_stride,
    num_queries,
    num_tokens,
    scale_log2,
    cap_log2,
    splits,
    SINKS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: tiles of queries x KV heads, splits of the keys."""
    kv_heads: tl.constexpr = KEYS.shape[0]
    channels: tl.constexpr = triton.next_power_of_2(KEYS.shape[2])
    per_tile: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    # Late queries see most keys, so they start first.
    first = (tl.num_programs(0) // kv_heads - 1 - tl.program_id(0) // kv_heads) * per_tile
    last = tl.minimum(first + per_tile, num_queries) - 1
    row = tl.arange(0, ROWS)
    # Rows that are too many repeat the last query, and are not stored.
    index = tl.minimum(first + row // GROUP, last)
    head = kv_head * GROUP + row % GROUP
    position = tl.load(positions + index).to(tl.int32)
    q = _load_queries(query, query_stride, query_head_stride, index, head, KEYS.shape[2], channels)

    seen_by_all = tl.load(positions + first).to(tl.int32) + 1
    end = tl.minimum(tl.load(positions + last).to(tl.int32) + 1, num_tokens)
    share = tl.cdiv(tl.cdiv(end, STEP), splits)
    begin = split * share * STEP
    stop = tl.minimum(begin + share * STEP, end)
    masked_from = tl.maximum(begin, tl.minimum(seen_by_all, stop) // STEP * STEP)
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        total, highest = with_sinks(total, highest, sinks, head, split)
    for token in tl.range(begin, masked_from, STEP):
        total, highest = _add_keys(
            total, highest, q, position, pages, page_stride, block_table, token, end, kv_head,
            scale_log2, cap_log2, KEYS, channels, STEP, False, CAPPED,
        )  # fmt: skip
    for token in tl.range(masked_from, stop, STEP):
        total, highest = _add_keys(
            total, highest, q, position, pages, page_stride, block_table, token, end, kv_head,
            scale_log2, cap_log2, KEYS, channels, STEP, True, CAPPED,
        )  # fmt: skip

    at = (split.to(tl.int64) * num_queries + index) * kv_heads * GROUP + head
    stored = first + row // GROUP <= last
    tl.store(lse + at, highest + tl.log2(total), mask=stored)


@triton.jit
def _load_queries(
    query,
    query_stride,
    head_stride,
    index,
    head,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A row per pair of `index` and `head`: `[rows, CHANNELS]`, zero from channel `SIZE` on."""
    channel = tl.arange(0, CHANNELS)[None, :]
    at = (index.to(tl.int64) * query_stride + head * head_stride)[:, None] + channel
    return tl.load(query + at, mask=channel < SIZE, other=0.0)


@triton.jit
def _add_keys(
    total,  # [rows]: sum of exponentials so far
    highest,  # [rows]: largest logit so far, to which they are relative
    q,
    position,
    pages,
    page_stride,
    block_table,
    first_token,
    end,
    kv_head,
    scale_log2,
    cap_log2,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One step of the online softmax's denominator, in powers of two."""
    token = first_token + tl.arange(0, STEP)
    k = load_tokens(pages, page_stride, block_table, token, end, kv_head, KEYS, CHANNELS, MASKED)
    k = in_type(k, q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        logits = capped(logits * scale_log2, cap_log2)
    if MASKED:
        visible = (token[None, :] <= position[:, None]) & (token < end)[None, :]
        logits = tl.where(visible, logits, float("-inf"))
    weights, decay, new_highest = exponentials(logits, highest, scale_log2, MASKED, CAPPED)
    return total * decay + tl.sum(weights, axis=1), new_highest


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _join_sums(
    lse,  # float32 [rows], base 2, written
    parts,  # float32 [splits, rows], base 2
    num_rows,
    splits,
    ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Log-sum-exp of the splits of each row. Grid: tiles of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, MAX_SPLITS)
    at = split.to(tl.int64)[:, None] * num_rows + row[None, :]
    valid = (split < splits)[:, None] & (row < num_rows)[None, :]
    logs = tl.load(parts + at, mask=valid, other=float("-inf"))
    largest = tl.max(logs, axis=0)
    joined = largest + tl.log2(tl.sum(tl.exp2(logs - largest[None, :]), axis=0))
    tl.store(lse + row, joined, mask=row < num_rows)


@triton.jit
def _first_at(positions, num_queries, position):
    """The first of ascending positions that is not below a given one."""
    low = num_queries * 0
    high = num_queries
    while low < high:
        middle = (low + high) // 2
        below = tl.load(positions + middle) < position
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit(
    do_not_specialize=["num_queries", "num_tokens", "splits", "late_from"],
    do_not_specialize_on_alignment=["block_table", "positions"],
)
def _columns(
    mass,  # float32 [splits x KV heads, tokens], written; one more behind it with `LATE`
    lse,  # float32 [queries, heads], base 2
    query,
    positions,
    pages,
    block_table,
    query_stride,
    query_head_stride,
    page_stride,
    num_queries,
    num_tokens,
    scale_log2,
    cap_log2,
    splits,
    late_from,  # first query that is gathered in the second, too
    HIGHEST: tl.constexpr,
    LATE: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: tiles of keys x KV heads, splits of the queries."""
    kv_heads: tl.constexpr = KEYS.shape[0]
    channels: tl.constexpr = triton.next_power_of_2(KEYS.shape[2])
    per_tile: tl.constexpr = ROWS // GROUP
    # Early keys are seen by most queries, so they start first.
    tile = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    token = tile * STEP + tl.arange(0, STEP)
    k = load_tokens(
        pages, page_stride, block_table, token, num_tokens, kv_head, KEYS, channels, True
    )
    k = in_type(k, query.dtype.element_ty)

    # First query that sees a key of the tile, and first that sees all of them.
    first = _first_at(positions, num_queries, tile * STEP)
    every = _first_at(positions, num_queries, (tile + 1) * STEP - 1)
    masked = tl.cdiv(every - first, per_tile)
    share = tl.cdiv(tl.cdiv(num_queries - first, per_tile), splits)
    begin = first + split * share * per_tile
    stop = tl.minimum(begin + share * per_tile, num_queries)
    unmasked_from = tl.maximum(begin, tl.minimum(first + masked * per_tile, stop))
    columns = tl.zeros((STEP,), tl.float32)
    late = tl.zeros((STEP,), tl.float32)
    for index in tl.range(begin, unmasked_from, per_tile):
        columns, late = _add_queries(
            columns, late, k, token, index, stop, query, query_stride, query_head_stride, positions,
            lse, kv_head, scale_log2, cap_log2, late_from, HIGHEST, LATE, KEYS, channels, GROUP,
            ROWS, True, CAPPED,
        )  # fmt: skip
    for index in tl.range(unmasked_from, stop, per_tile):
        columns, late = _add_queries(
            columns, late, k, token, index, stop, query, query_stride, query_head_stride, positions,
            lse, kv_head, scale_log2, cap_log2, late_from, HIGHEST, LATE, KEYS, channels, GROUP,
            ROWS, False, CAPPED,
        )  # fmt: skip
    at = (split * kv_heads + kv_head).to(tl.int64) * num_tokens + token
    tl.store(mass + at, columns, mask=token < num_tokens)
    if LATE:
        behind = (tl.num_programs(1) * kv_heads).to(tl.int64) * num_tokens
        tl.store(mass + behind + at, late, mask=token < num_tokens)


@triton.jit
def _add_queries(
    columns,  # float32 [keys]: weights summed so far, or the highest
    late,  # float32 [keys]: those of late queries summed so far
    k,
    token,
    first,
    stop,
    query,
    query_stride,
    query_head_stride,
    positions,
    lse,
    kv_head,
    scale_log2,
    cap_log2,
    late_from,
    HIGHEST: tl.constexpr,
    LATE: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Weights of a tile of queries, gathered by key."""
    row = tl.arange(0, ROWS)
    exists = (first + row // GROUP < stop) & (row < ROWS // GROUP * GROUP)
    index = tl.minimum(first + row // GROUP, stop - 1)
    head = kv_head * GROUP + row % GROUP
    q = _load_queries(query, query_stride, query_head_stride, index, head, KEYS.shape[2], CHANNELS)
    # Infinity where there is no row: its weights are zero.
    at = index.to(tl.int64) * (KEYS.shape[0] * GROUP) + head
    sums = tl.load(lse + at, mask=exists, other=float("inf"))
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAPPED:
        logits = capped(logits, cap_log2)
    weights = tl.exp2(logits - sums[:, None])
    if MASKED:
        position = tl.load(positions + index).to(tl.int32)
        weights = tl.where(token[None, :] <= position[:, None], weights, 0.0)
    if HIGHEST:
        columns = tl.maximum(columns, tl.max(weights, axis=0))
    else:
        columns += tl.sum(weights, axis=0)
    if LATE:
        late += tl.sum(tl.where((index >= late_from)[:, None], weights, 0.0), axis=0)
    return columns, late
