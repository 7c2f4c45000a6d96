# SPDX-License-Identifier: Apache-2.0
"""How the Triton attention kernels divide their work: tiles, splits, and sizes of programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton  # type: ignore[import-untyped]

from vllm_segreuse.kernels.flash_attention import CommonKeys
from vllm_segreuse.kernels.pages import TiledStrides

MAX_SPLITS = 32
COMMON_TILES = 16
"""Tiles of a request, on average, from which on the keys that all queries of a tile see are left to
FlashAttention 3. With fewer, queries of a tile lie far apart, and it may not pay
(docs/gpu-results.md)."""
_WIDEST = 3
"""How many times its share of a context a tile may span before it is cut, where its first keys are
left to FlashAttention 3. Keys within the span are attended to by one program, for which all others
would wait. Random positions never lie so far apart."""
_MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True)
class Tuning:
    """Sizes of one program.

    Attributes:
        rows: queries times heads per KV head, a power of two from 16.
        keys: tokens per step, a power of two from 16.
        warps: of 32 threads.
        stages: loads in flight, in steps. Blocks are looked up in a table, which takes some: from
            five on, keys and values are loaded two steps ahead.
        registers: most of a thread; None: as many as the compiler likes.
        resident: programs that run on a multiprocessor at a time.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    resident: int = 2


@dataclass(frozen=True)
class Schedule:
    """Which tile computes which queries; the same for all layers of a pass.

    Attributes:
        tiles: int32 `[tiles, 5]`: first query, number of queries (0 for tiles that are not
            needed) and row of the block tables; then what `common` has done: number of keys, and
            first row of its results. Those with most keys first.
        queries: how many there are.
        group: query heads per KV head.
        splits: among how many programs the keys of a tile are divided.
        tuning: sizes of one program.
        common: keys that are left to FlashAttention 3; None for none.
    """

    tiles: torch.Tensor
    queries: int
    group: int
    splits: int
    tuning: Tuning
    common: CommonKeys | None = None


def default_tuning(dtype: torch.dtype, head_size: int, queries: int, group: int) -> Tuning:
    """Sizes that fit registers and shared memory from sm_80 on (99 KiB is the least).

    Args:
        dtype: of queries and pages.
        head_size: channels.
        queries: how many a tile can have.
        group: query heads per KV head.
    """
    wide = head_size > 128
    wanted = triton.next_power_of_2(max(16, queries * group))
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:  # no tensor cores: a step's products are held in registers
        rows = max(least, min(32, wanted))
        return Tuning(rows, 16, 8 if rows >= 32 else 4, 2)
    rows = max(least, min(64 if wide else 128, wanted))
    return Tuning(rows, 32 if wide else 64, 8 if rows >= 128 else 4, 3)


def attention_tuning(
    dtype: torch.dtype, head_size: int, queries: int, group: int, capability: tuple[int, int]
) -> Tuning:
    """Sizes for `sparse_attention`: `default_tuning`, but what was measured to be faster.

    On Hopper keys and values are loaded two steps ahead, for which a program takes so much of the
    shared memory that there is one on a multiprocessor. Of 18 sizes tried on an H100 none was more
    than 2 % faster for passes of 384 to 1,664 queries (docs/gpu-results.md).

    Args:
        dtype, head_size, queries, group: see `default_tuning`.
        capability: of the GPU, (9, 0) for Hopper.
    """
    tuning = default_tuning(dtype, head_size, queries, group)
    if capability[0] == 9 and tuning.rows == 128 and 64 < head_size <= 128:
        return replace(tuning, stages=5, resident=1)
    return tuning


def plan(
    query: torch.Tensor,
    keys: TiledStrides,
    block_tables: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int = 0,
    flash: bool = False,
    common_tiles: int | None = None,
    splits: int | None = None,
    tuning: Tuning | None = None,
) -> Schedule:
    """The schedule of a pass. Computed on the device; the host does not wait for it.

    Args:
        query: the queries of any layer; only shape, dtype and device matter.
        keys: how they lie in a page; only the shape matters.
        block_tables, request, positions, window: see `sparse_attention`.
        flash: whether `flash_attention` takes the pages.
        common_tiles: instead of `COMMON_TILES`.
        splits: instead of what fills the machine.
        tuning: instead of `attention_tuning`.

    Raises:
        ValueError: heads that cannot be grouped, or tiles too small for a group.
    """
    queries, heads, head_size = query.shape
    kv_heads, block_size, _ = keys.shape
    group = heads_per_kv_head(heads, kv_heads)
    requests = block_tables.shape[0]
    device = query.device
    if tuning is None:
        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        tuning = attention_tuning(
            query.dtype, head_size, triton.cdiv(queries, requests), group, capability
        )
    if tuning.rows < group:
        raise ValueError(f"tiles of {tuning.rows} rows cannot hold {group} heads; give more rows")
    per_tile = tuning.rows // group
    # How many tiles there are is known on the device only; this many are enough in any case.
    most = min(queries, queries // per_tile + requests)
    most_keys = block_tables.shape[1] * block_size
    wanted = COMMON_TILES if common_tiles is None else common_tiles
    shared = flash and not window and queries >= wanted * per_tile * requests
    share = most_keys * requests // most if shared else most_keys
    if splits is None:
        splits = splits_to_fill(most * kv_heads, share, device, tuning.resident)
    number = torch.arange(queries, device=device) - torch.searchsorted(request, request)
    in_tile = number % per_tile
    starts = in_tile == 0
    if shared:
        widest = _WIDEST * max(1, share)
        starts |= _cut(in_tile, starts, positions, widest)
        most = min(queries, most + requests * (most_keys // widest))
    tile = starts.cumsum(0) - 1
    edges = torch.searchsorted(tile, torch.arange(most + 1, device=device))
    first, count = edges[:-1].clamp(max=queries - 1), edges.diff()
    last = positions[(first + count - 1).clamp_(min=0)].masked_fill_(count == 0, -1)
    longest = last.argsort(descending=True)
    first, count = first[longest], count[longest]
    row = request[first].long()
    done = place = torch.zeros_like(first)
    common = None
    if shared:
        done = (positions[first] + 1) // tuning.keys * tuning.keys  # whole steps of a program
        done = done.masked_fill_(count == 0, 0)
        until = count.cumsum(0)
        place = until - count
        order = _in_tiles(first, place, until, queries)
        bounds = torch.nn.functional.pad(until, (1, 0)).int()
        tables = block_tables[row]
        common = CommonKeys(order, bounds, done.int(), tables, per_tile, most_keys)
    tiles = torch.stack([first, count, row, done, place], dim=1).int()
    return Schedule(tiles, queries, group, splits, tuning, common)


def _cut(
    in_tile: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, widest: int
) -> torch.Tensor:
    """Before which queries a tile is cut that spans more than `widest` positions: those that are
    the first in their part of the context, in parts of so many. So there are never more cuts than
    such parts, however queries lie.

    Args:
        in_tile: each query's place in its tile.
        starts: which queries are the first of their tiles.
        positions: of the queries.
    """
    number = torch.arange(len(in_tile), device=in_tile.device)
    tile = starts.cumsum(0) - 1
    last = torch.searchsorted(tile, tile, right=True) - 1
    is_wide = positions[last] - positions[number - in_tile] > widest
    part = positions // widest
    return is_wide & (part != part[(number - 1).clamp_(min=0)])


def _in_tiles(
    first: torch.Tensor, place: torch.Tensor, until: torch.Tensor, queries: int
) -> torch.Tensor:
    """All queries, tile by tile: each tile's first query, and the places that it takes."""
    number = torch.arange(queries, device=first.device)
    tile = torch.searchsorted(until, number, right=True)
    return first[tile] + number - place[tile]


plan_with_flash = functools.partial(plan, flash=True)
"""`plan`, where `flash_attention` takes the pages."""


def heads_per_kv_head(heads: int, kv_heads: int) -> int:
    """Raises ValueError where heads cannot be grouped, or a group is too large for a tile."""
    if heads % kv_heads or heads // kv_heads > 128:
        raise ValueError(
            f"{heads} query heads over {kv_heads} KV heads; it must be a multiple, at most 128-fold"
        )
    return heads // kv_heads


def splits_to_fill(programs: int, keys: int, device: torch.device, resident: int) -> int:
    """Among how many programs to divide `keys`, so that every multiprocessor has what it can run.

    More than that was slower on an H100 (docs/gpu-results.md): what is divided is joined.

    Args:
        programs: there are without splits.
        keys: of each.
        device: a GPU, or the host, where nothing is divided.
        resident: see `Tuning`.
    """
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(resident * processors, max(1, programs))
    return max(1, min(wanted, keys // _MIN_KEYS_PER_SPLIT, MAX_SPLITS))
