# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803 (compile-time arguments of kernels are written in capitals)
"""`sparse_attention` in Triton, as FlashAttention does it (Dao 2023), for scattered queries.

A tile is a few successive queries of one request, with all heads that share a KV head: its rows
read every key once. Queries of a tile lie apart, so its keys fall in two: those before the first
query are seen by all rows, only the rest needs a mask. With too few tiles to fill the machine, the
keys are split among programs, whose results are joined by their log-sum-exp (Flash-Decoding).

On Hopper the former are left to FlashAttention 3, where that pays, and a tile starts from its
results (`flash_attention.py`).
"""

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_segreuse.kernels import flash_attention
from vllm_segreuse.kernels.arguments import (
    check_places,
    check_queries,
    check_strides,
    check_weights,
    fit,
)
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides
from vllm_segreuse.kernels.triton_addresses import load_tokens
from vllm_segreuse.kernels.triton_formats import in_type, readable
from vllm_segreuse.kernels.triton_schedule import MAX_SPLITS, Schedule, plan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(layout: PageLayout, dtype: torch.dtype, queries: torch.dtype | None = None) -> bool:
    """Whether `sparse_attention` takes pages of this layout and dtype, and queries of theirs.

    Triton's `dot` takes 16 channels or more; tiles of more than 256 do not fit shared memory.
    """
    return fit(queries or dtype, dtype, DTYPES) and 16 <= layout.keys.shape[2] <= 256


def sparse_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    values: TiledStrides,
    block_tables: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    value_scale: float = 1.0,
    schedule: Schedule | None = None,
) -> None:
    """As `reference.sparse_attention`; in addition:

    Args:
        schedule: what `plan` returned for this pass; made here if there is none.

    Raises:
        ValueError: the arguments are not as described.
    """
    queries, heads, _ = query.shape
    if not queries:
        return
    check_inputs(query, pages, keys, block_tables, scale)
    check_strides(values, pages)
    check_places(query, block_tables, request, positions, keys.shape[1])
    check_weights(query, window, sinks, soft_cap)
    if out.dtype != query.dtype or out.device != query.device:
        raise ValueError(f"out is {out.dtype} on {out.device}; expected it to be like query")
    if out.stride(2) != 1 or out.shape != (queries, heads, values.shape[2]):
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}; expected "
            f"{(queries, heads, values.shape[2])} with channels side by side"
        )
    if schedule is None:
        schedule = plan(query, keys, block_tables, request, positions)
    if (schedule.queries, schedule.group) != (queries, heads // keys.shape[0]):
        raise ValueError(
            f"the schedule is for {schedule.queries} queries in groups of {schedule.group} heads, "
            f"not {queries} in groups of {heads // keys.shape[0]}; plan this pass anew"
        )
    if schedule.common is not None and window:
        raise ValueError(f"the schedule is for layers without a window, not {window} tokens")
    splits, tuning = schedule.splits, schedule.tuning
    started, started_lse = query, query  # not touched where there is nothing to start from
    if schedule.common is not None:
        given = (query, pages, keys, values, schedule.common, scale, soft_cap)
        started, started_lse = flash_attention.attend(*given)
    target, lse = out, out  # `lse` is not touched without splits
    if splits > 1:
        target = query.new_empty((splits, queries, heads, out.shape[2]), dtype=torch.float32)
        lse = query.new_empty((splits, queries, heads), dtype=torch.float32)
    kv_heads = keys.shape[0]
    # Tiles are the slow part of the first dimension: those with most keys start first.
    _attend[(schedule.tiles.shape[0] * kv_heads, splits)](
        target,
        lse,
        query,
        readable(pages),
        block_tables,
        schedule.tiles,
        positions,
        query if sinks is None else sinks,
        started,
        started_lse,
        target.stride(-3),
        target.stride(-2),
        query.stride(0),
        query.stride(1),
        pages.stride(0),
        block_tables.stride(0),
        queries,
        splits,
        scale * math.log2(math.e),
        soft_cap * math.log2(math.e),
        value_scale,
        KEYS=keys,
        VALUES=values,
        WINDOW=window,
        SINKS=sinks is not None,
        CAPPED=soft_cap > 0,
        STARTED=schedule.common is not None,
        GROUP=schedule.group,
        SPLIT=splits > 1,
        ROWS=tuning.rows,
        STEP=tuning.keys,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
        enable_fp_fusion=True,
    )
    if splits > 1:
        _join[(queries, heads)](
            out,
            target,
            lse,
            out.stride(0),
            out.stride(1),
            queries,
            heads,
            splits,
            CHANNELS=out.shape[2],
            MAX_SPLITS=max(MAX_SPLITS, triton.next_power_of_2(splits)),
            enable_fp_fusion=True,
        )


def check_inputs(
    query: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    block_tables: torch.Tensor,
    scale: float,
) -> None:
    """Raises ValueError where a kernel would read something else than what is meant."""
    check_queries(query, pages, keys, DTYPES)
    if not 16 <= keys.shape[2] <= 256:
        raise ValueError(f"keys have {keys.shape[2]} channels; expected 16 to 256")
    if not scale > 0:  # the largest logit is found before they are scaled
        raise ValueError(f"scale is {scale}; expected more than 0")
    if query.stride(2) != 1 or block_tables.stride(-1) != 1:
        raise ValueError(
            f"strides of query are {query.stride()} and of the block tables "
            f"{block_tables.stride()}; the last of each must be 1"
        )


# Numbers that change from pass to pass are not compiled in, not even as multiples of 16; nor is
# whether rows and slices of tables begin at such an address.
@triton.jit(
    do_not_specialize=["table_stride", "num_queries", "splits"],
    do_not_specialize_on_alignment=["block_tables", "positions"],
)
def _attend(
    out,
    lse,
    query,
    pages,
    block_tables,
    tiles,
    positions,
    sinks,
    started,  # [queries, heads, channels]: attention to a tile's first keys
    started_lse,  # float32 [heads, queries], natural logarithms
    out_query_stride,
    out_head_stride,
    query_stride,
    query_head_stride,
    page_stride,
    table_stride,
    num_queries,
    splits,
    scale_log2,
    cap_log2,
    value_scale,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    STARTED: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: tiles x KV heads, splits. With `SPLIT`, `out` and `lse` get what `_join` joins."""
    kv_heads: tl.constexpr = KEYS.shape[0]
    tile = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    first = tl.load(tiles + 5 * tile)
    count = tl.load(tiles + 5 * tile + 1)
    if count == 0:
        return
    block_table = block_tables + tl.load(tiles + 5 * tile + 2).to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    # Rows that are too many repeat the last query, and are not stored.
    index = (first + tl.minimum(row // GROUP, count - 1)).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    position = tl.load(positions + index).to(tl.int32)
    key_channels: tl.constexpr = triton.next_power_of_2(KEYS.shape[2])
    channel = tl.arange(0, key_channels)[None, :]
    at = (index * query_stride + head * query_head_stride)[:, None] + channel
    q = tl.load(query + at, mask=channel < KEYS.shape[2], other=0.0)

    seen_by_all = tl.load(positions + first).to(tl.int32) + 1
    end = tl.load(positions + first + count - 1).to(tl.int32) + 1
    lowest = tl.load(tiles + 5 * tile + 3)
    if WINDOW > 0:  # later queries of the tile see less of it: all steps are masked
        lowest = tl.maximum(seen_by_all - WINDOW, 0) // STEP * STEP
    share = tl.cdiv(tl.cdiv(end - lowest, STEP), splits)
    begin = lowest + split * share * STEP
    stop = tl.minimum(begin + share * STEP, end)
    masked_from = begin
    if WINDOW == 0:
        masked_from = tl.maximum(begin, tl.minimum(seen_by_all, stop) // STEP * STEP)

    channels: tl.constexpr = triton.next_power_of_2(VALUES.shape[2])
    summed = tl.zeros((ROWS, channels), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        total, highest = with_sinks(total, highest, sinks, head, split)
    if STARTED and (lowest > 0) & (split == 0):
        place = tl.load(tiles + 5 * tile + 4) + tl.minimum(row // GROUP, count - 1)
        summed, total, highest = _started(
            total, highest, started, started_lse, place, head, num_queries,
            kv_heads * GROUP, VALUES.shape[2], channels,
        )  # fmt: skip
    for token in tl.range(begin, masked_from, STEP):
        summed, total, highest = _step(
            summed, total, highest, q, position, pages, page_stride, block_table, token, end,
            kv_head, scale_log2, cap_log2, KEYS, VALUES, key_channels, channels, STEP, False,
            WINDOW, CAPPED,
        )  # fmt: skip
    for token in tl.range(masked_from, stop, STEP):
        summed, total, highest = _step(
            summed, total, highest, q, position, pages, page_stride, block_table, token, end,
            kv_head, scale_log2, cap_log2, KEYS, VALUES, key_channels, channels, STEP, True,
            WINDOW, CAPPED,
        )  # fmt: skip

    # A share of the keys may lie behind a row's position: then its sum is zero.
    summed = summed / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    channel = tl.arange(0, channels)[None, :]
    stored = row < count * GROUP
    out_row = split.to(tl.int64) * num_queries + index
    at = (out_row * out_query_stride + head * out_head_stride)[:, None] + channel
    valid = stored[:, None] & (channel < VALUES.shape[2])
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=valid)
    if SPLIT:
        tl.store(lse + out_row * kv_heads * GROUP + head, highest + tl.log2(total), mask=stored)


@triton.jit
def with_sinks(total, highest, sinks, head, split):
    """Sum and largest logit of rows that have seen their head's sink, which is in one split."""
    sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    here = split == 0
    return tl.where(here, 1.0, total), tl.where(here, sink, highest)


@triton.jit
def _started(
    total,
    highest,
    started,
    started_lse,
    place,
    head,
    num_queries,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """What rows that have seen at most a sink have summed behind their tile's first keys."""
    log = tl.load(started_lse + head * num_queries + place) * 1.4426950408889634
    channel = tl.arange(0, PADDED)[None, :]
    at = ((place.to(tl.int64) * HEADS + head) * CHANNELS)[:, None] + channel
    mean = tl.load(started + at, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    most = tl.maximum(highest, log)
    weight = tl.exp2(log - most)
    return mean * weight[:, None], total * tl.exp2(highest - most) + weight, most


@triton.jit
def capped(logits, cap):
    """`cap * tanh(logits / cap)`."""
    shrunk = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(logits) / cap)
    bounded = cap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(logits < 0.0, -bounded, bounded)


@triton.jit
def exponentials(logits, highest, scale_log2, MASKED: tl.constexpr, CAPPED: tl.constexpr):
    """Of a step's logits, and of `highest`, the largest before; both relative to the largest so
    far, which comes last. Logits are scaled here, unless they are capped: with the subtraction, in
    one instruction, and the largest of each row by itself."""
    factor = 1.0 if CAPPED else scale_log2
    new_highest = tl.maximum(highest, tl.max(logits, axis=1) * factor)
    reference = new_highest
    if MASKED:  # a row that has seen no key yet: -inf - -inf is not a number
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    return tl.exp2(logits * factor - reference[:, None]), tl.exp2(highest - reference), new_highest


@triton.jit
def _step(
    summed,  # float32 [rows, channels]: weighted values so far
    total,  # [rows]: sum of weights so far
    highest,  # [rows]: largest logit so far, to which weights are relative
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
    VALUES: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One step of the online softmax, in powers of two."""
    token = first_token + tl.arange(0, STEP)
    k = load_tokens(
        pages, page_stride, block_table, token, end, kv_head, KEYS, KEY_CHANNELS, MASKED
    )
    k = in_type(k, q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        logits = capped(logits * scale_log2, cap_log2)
    if MASKED:
        visible = token[None, :] <= position[:, None]
        if WINDOW > 0:
            visible &= token[None, :] > position[:, None] - WINDOW
        logits = tl.where(visible, logits, float("-inf"))
    weights, decay, new_highest = exponentials(logits, highest, scale_log2, MASKED, CAPPED)
    total = total * decay + tl.sum(weights, axis=1)
    v = load_tokens(pages, page_stride, block_table, token, end, kv_head, VALUES, CHANNELS, MASKED)
    v = in_type(v, q.dtype)
    summed = tl.dot(weights.to(v.dtype), v, summed * decay[:, None], input_precision="ieee")
    return summed, total, new_highest


@triton.jit(do_not_specialize=["num_queries", "splits"])
def _join(
    out,
    parts,  # float32 [splits, queries, heads, channels]
    lse,  # float32 [splits, queries, heads], base 2
    out_query_stride,
    out_head_stride,
    num_queries,
    num_heads,
    splits,
    CHANNELS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Average the splits, each weighted by its sum of exponentials. Grid: queries, heads."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    channel = tl.arange(0, triton.next_power_of_2(CHANNELS))
    row = (split * num_queries + query) * num_heads + head
    logs = tl.load(lse + row, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    at = row[:, None] * CHANNELS + channel[None, :]
    valid = (split < splits)[:, None] & (channel < CHANNELS)[None, :]
    values = tl.load(parts + at, mask=valid, other=0.0)
    joined = tl.sum(values * weights[:, None], axis=0)
    at_out = query * out_query_stride + head * out_head_stride + channel
    tl.store(out + at_out, joined.to(out.dtype.element_ty), mask=channel < CHANNELS)
