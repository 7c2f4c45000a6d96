# SPDX-License-Identifier: Apache-2.0
"""Part `sizes` of the suite `gpu`: sparse-query attention with programs of several sizes, and keys
divided among several programs.

What `triton_schedule` takes for a GPU is what was fastest here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import harness
from bench.gpu.common import Found
from bench.suites import kernels
from vllm_segreuse.kernels import dispatch
from vllm_segreuse.kernels.triton_schedule import Tuning, attention_tuning, plan

# Blocks are looked up in a table, which takes a stage of its own: from five stages on, keys and
# values are loaded two steps ahead.
SIZES = (
    *(Tuning(128, 64, warps, stages) for warps in (4, 8) for stages in (3, 5)),
    *(Tuning(128, 32, 4, stages) for stages in (3, 5, 7)),
    *(Tuning(64, 64, 4, stages) for stages in (3, 5)),
    Tuning(64, 32, 4, 5),
    Tuning(256, 64, 8, 3),
)
QUERIES = (384, 832, 1664)
SPLITS = (1, 2, 3, 4, 6, 8, 12)
REPEATS = 15


def run() -> Found:
    """Milliseconds of each size at 10 % of two contexts, and of numbers of splits at some queries;
    what is in use, over the fastest."""
    case = kernels.GPU
    backend: Any = kernels._GpuBackend(case)
    attend = dispatch.choose(case.device, torch.bfloat16, backend.layout).sparse_attention
    assert attend is not None
    capability = torch.cuda.get_device_capability(case.device)
    group = case.heads // case.kv_heads
    rows: list[harness.Row] = []
    figures: dict[str, float | str] = {}
    for context in case.contexts:
        positions = kernels._scattered(context).to(case.device)
        measured = _measured(case, backend, attend, positions, context)
        used = attention_tuning(torch.bfloat16, case.head_size, len(positions), group, capability)
        fastest = min(measured, key=lambda size: measured[size])
        for size, median_ms in measured.items():
            rows.append({"context": context, **vars(size), "median_ms": median_ms})
        figures[f"fastest_size_{context}"] = str(fastest)
        figures[f"in_use_over_fastest_{context}"] = measured[used] / measured[fastest]
        for queries in QUERIES:
            by_splits, in_use = _split(case, backend, attend, queries, context)
            for splits, median_ms in by_splits.items():
                row = {"context": context, "queries": queries, "splits": splits}
                rows.append(row | {"median_ms": median_ms})
            name = f"{queries}_of_{context}"
            figures[f"splits_in_use_{name}"] = in_use
            figures[f"splits_over_fastest_{name}"] = by_splits[in_use] / min(by_splits.values())
    return rows, figures


def _split(
    case: kernels.Case, backend: Any, attend: Callable[..., None], queries: int, context: int
) -> tuple[dict[int, float], int]:
    """Milliseconds by number of splits, and the number that a pass takes."""
    positions = kernels._scattered(context, queries).to(case.device)
    query, out = _queries(case, positions)
    layout, table = backend.layout, backend.block_table(context)[None]
    where = table, torch.zeros_like(positions), positions
    in_use = plan(query, layout.keys, *where).splits
    actions: dict[str, kernels.Action] = {}
    for splits in sorted({*SPLITS, in_use}):
        schedule = plan(query, layout.keys, *where, splits=splits)
        arguments = (out, query, backend.pages, layout.keys, layout.values, *where, case.scale)
        actions[str(splits)] = partial(attend, *arguments, schedule=schedule)
    taken = kernels.timed(case.device, actions, REPEATS)
    return {int(name): statistics.median(times) for name, times in taken.items()}, in_use


def _queries(case: kernels.Case, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = (len(positions), case.heads, case.head_size)
    query = torch.randn(size, device=case.device).to(torch.bfloat16)
    return query, torch.empty_like(query)


def _measured(
    case: kernels.Case,
    backend: Any,
    attend: Callable[..., None],
    positions: torch.Tensor,
    context: int,
) -> dict[Tuning, float]:
    query, out = _queries(case, positions)
    layout, table = backend.layout, backend.block_table(context)[None]
    where = table, torch.zeros_like(positions), positions
    actions: dict[str, kernels.Action] = {}
    for tuning in SIZES:
        schedule = plan(query, layout.keys, *where, tuning=tuning)
        pages = backend.pages, layout.keys, layout.values
        arguments = (out, query, *pages, *where, case.scale)
        actions[str(tuning)] = partial(attend, *arguments, schedule=schedule)
    taken = kernels.timed(case.device, actions, REPEATS)
    return {tuning: statistics.median(taken[str(tuning)]) for tuning in SIZES}
