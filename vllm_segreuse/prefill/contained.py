# SPDX-License-Identifier: Apache-2.0
"""The sparse pass, contained: an error in it costs requests their reuse, not the engine.

    prepare ──► all ranks ready? ──► compute
                    │ no: prepare in full ──► compute

Tensor-parallel ranks meet in a collective of every layer, and a rank that failed would never come.
So all that can be done without the others is done first, and the ranks agree that it went well. An
error after that cannot be mended. vLLM hears of errors of one rank only (`_execute_worker_rpc` in
`v1/executor/multiproc_executor.py`) and would wait for the others for minutes; but it watches their
processes. The rank ends its own, and with it the engine.
"""

from __future__ import annotations

import logging
import os

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from vllm_segreuse.cache.plan import ReusePlan
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill

logger = init_logger("vllm.segreuse")


def run_contained(prefill: SparsePrefill, plans: list[ReusePlan]) -> PassReport:
    """Carry plans out; if that fails, compute their tokens without reuse."""
    if get_tp_group().world_size == 1:
        return _run_alone(prefill, plans)
    try:
        return _run_together(prefill, plans)
    except Exception:
        logger.critical(
            "segment reuse failed between tensor-parallel ranks, which cannot start over: the "
            "engine stops; requests of the pass: %s",
            [plan.request_id for plan in plans],
            exc_info=True,
        )
        logging.shutdown()
        os._exit(1)  # an orderly end would wait for the other ranks, which wait for this one


def _run_alone(prefill: SparsePrefill, plans: list[ReusePlan]) -> PassReport:
    try:
        return prefill.run(plans)
    except Exception:
        _log(plans)
        return prefill.run([plan.in_full() for plan in plans])


def _run_together(prefill: SparsePrefill, plans: list[ReusePlan]) -> PassReport:
    prepared = None
    try:
        prepared = prefill.prepare(plans)
    except Exception:
        _log(plans)
    if not _on_all_ranks(prepared is not None):
        prepared = prefill.prepare([plan.in_full() for plan in plans])
    assert prepared is not None
    return prefill.compute(prepared)


def _on_all_ranks(ready: bool) -> bool:
    flag = torch.tensor([ready], dtype=torch.int32)
    torch.distributed.all_reduce(
        flag, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(flag.item())


def _log(plans: list[ReusePlan]) -> None:
    logger.exception(
        "segment reuse failed; computing in full: %s", [plan.request_id for plan in plans]
    )
