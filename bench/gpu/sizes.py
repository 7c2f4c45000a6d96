# SPDX-License-Identifier: Apache-2.0
"""Part `sizes` of the suite `gpu`: sparse-query attention with programs of several sizes.

What `triton_schedule.attention_tuning` takes for a GPU is what was fastest here.
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

SIZES = (
    Tuning(128, 64, 4, 3),
    Tuning(128, 64, 8, 5, resident=1),
    Tuning(128, 64, 8, 7, resident=1),
    Tuning(128, 32, 8, 5, registers=128),
    Tuning(128, 32, 8, 7, registers=128),
    Tuning(256, 64, 8, 5, resident=1),
    Tuning(256, 32, 8, 5, resident=1),
    Tuning(256, 32, 8, 7, resident=1),
    Tuning(128, 128, 8, 3, resident=1),
)
LOADS = ((16384, 384), (16384, 832), (16384, 1664), (65536, 6553))
"""Tokens of a context, and of them the queries."""
REPEATS = 15


def run() -> Found:
    """Milliseconds of each size at each load; what is in use, over the fastest."""
    case = kernels.GPU
    backend: Any = kernels.GpuBackend(case)
    attend = dispatch.choose(case.device, torch.bfloat16, backend.layout).sparse_attention
    assert attend is not None
    capability = torch.cuda.get_device_capability(case.device)
    group = case.heads // case.kv_heads
    rows: list[harness.Row] = []
    figures: dict[str, float | str] = {}
    for context, queries in LOADS:
        measured = _measured(case, backend, attend, context, queries)
        used = attention_tuning(torch.bfloat16, case.head_size, queries, group, capability)
        fastest = min(measured, key=lambda size: measured[size])
        for size, median_ms in measured.items():
            row = {"context": context, "queries": queries, **vars(size)}
            rows.append(row | {"median_ms": median_ms})
        figures[f"fastest_size_{queries}_of_{context}"] = str(fastest)
        name = f"in_use_over_fastest_{queries}_of_{context}"
        figures[name] = measured[used] / measured[fastest]
    return rows, figures


def _measured(
    case: kernels.Case, backend: Any, attend: Callable[..., None], context: int, queries: int
) -> dict[Tuning, float]:
    positions = kernels.random_positions(context, queries).to(case.device)
    size = (queries, case.heads, case.head_size)
    query = torch.randn(size, device=case.device).to(torch.bfloat16)
    out = torch.empty_like(query)
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
