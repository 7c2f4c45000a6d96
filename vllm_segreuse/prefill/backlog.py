# SPDX-License-Identifier: Apache-2.0
"""Plans of a worker: small ones before a step's forward, large ones a few chunks behind each.

    step n     start: align all of the plan ─► forward ─► chunks
    step n+1                                   forward ─► chunks
    step n+2                                   forward ─► chunks ─► done: vLLM may schedule it

Requests that decode beside a large plan get a token in every step. Donors are read in the first
step only; from then on the plan reads and writes blocks of its own request, which vLLM gives to
nobody else until they are reported as loaded. All ranks hold the same queue and do the same work in
a step, so they report it in the same one.

An error in a pass costs requests their reuse, not the engine:

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill.chunks import Chunks, finish
from vllm_segreuse.prefill.executor import PassReport, Prepared, SparsePrefill

logger = init_logger("vllm.segreuse")


class Backlog:
    """The plans that a worker has taken over.

    Args:
        prefill: carries them out.
        step_work: layer-tokens of spread plans in one step.

    Attributes:
        prefill, step_work: as given.
    """

    def __init__(self, prefill: SparsePrefill, step_work: int) -> None:
        self.prefill = prefill
        self.step_work = step_work
        self._under_way: dict[str, Chunks[PassReport]] = {}  # in order of arrival

    @property
    def is_empty(self) -> bool:
        """Whether no plan is under way."""
        return not self._under_way

    def take(self, plans: list[ReusePlan]) -> PassReport | None:
        """A step's plans: align all, finish those that are not spread.

        Returns:
            What the finished ones took; None if there were none.
        """
        for plan in plans:
            if plan.spread:
                self._under_way[plan.request_id] = self._chunks([plan], self.step_work)
        now = [plan for plan in plans if not plan.spread]
        return finish(self._chunks(now)) if now else None

    def _chunks(self, plans: list[ReusePlan], chunk_work: int | None = None) -> Chunks[PassReport]:
        """Align plans, and return what is left to be run."""
        return compute_or_in_full(self.prefill, prepare_or_in_full(self.prefill, plans, chunk_work))

    def advance(self) -> dict[str, PassReport]:
        """A step's share of the spread plans, the oldest first, behind its forward.

        Returns:
            Those that are done, by request.
        """
        done: dict[str, PassReport] = {}
        left = self.step_work
        with self.prefill.after_forward():
            while self._under_way and left > 0:
                request_id, chunks = next(iter(self._under_way.items()))
                try:
                    left -= next(chunks)
                except StopIteration as end:
                    del self._under_way[request_id]
                    done[request_id] = end.value
        return done

    def drop(self, request_ids: Iterable[str]) -> set[str]:
        """Requests have ended; those of them whose plan was under way, which now is not."""
        dropped = self._under_way.keys() & set(request_ids)
        for request_id in dropped:
            self._under_way.pop(request_id).close()
        return dropped


def prepare_or_in_full(
    prefill: SparsePrefill, plans: list[ReusePlan], chunk_work: int | None = None
) -> Prepared:
    """Prepare plans; if that fails on any rank, on all of them without reuse.

    Args:
        prefill: carries them out.
        plans: of one step.
        chunk_work: see `Batch`.
    """
    prepared = None
    with _fatal_between_ranks(plans):
        try:
            prepared = prefill.prepare(plans, chunk_work)
        except Exception:
            log_failure(plans)
        everywhere = on_all_ranks(prepared is not None)
        if prepared is None or not everywhere:
            prepared = _in_full(prefill, plans, chunk_work)
        return prepared


def compute_or_in_full(prefill: SparsePrefill, prepared: Prepared) -> Chunks[PassReport]:
    """Compute prepared plans; if that fails, once more without reuse."""
    plans = prepared.plans
    with _fatal_between_ranks(plans):
        try:
            return (yield from prefill.compute(prepared))
        except Exception:
            if not _is_alone():
                raise
            log_failure(plans)
        again = _in_full(prefill, plans, prepared.chunk_work)
        return (yield from prefill.compute(again))


def _in_full(prefill: SparsePrefill, plans: list[ReusePlan], chunk_work: int | None) -> Prepared:
    return prefill.prepare([plan.without_copies() for plan in plans], chunk_work, apart=True)


def _is_alone() -> bool:
    return bool(get_tp_group().world_size == 1)


@contextmanager
def _fatal_between_ranks(plans: list[ReusePlan]) -> Iterator[None]:
    if _is_alone():
        yield
        return
    with fatal([plan.request_id for plan in plans], "tensor-parallel ranks"):
        yield


@contextmanager
def fatal(request_ids: Iterable[str], between: str) -> Iterator[None]:
    """An error ends this process, and with it the engine.

    Args:
        request_ids: of the pass.
        between: whose agreement it breaks.
    """
    try:
        yield
    except Exception:
        logger.critical(
            "segment reuse failed between %s, which cannot start over: the engine stops; requests "
            "of the pass: %s",
            between,
            list(request_ids),
            exc_info=True,
        )
        logging.shutdown()
        os._exit(1)  # an orderly end would wait for the other ranks, which wait for this one


def on_all_ranks(ready: bool) -> bool:
    """Whether all tensor-parallel ranks are, of one pipeline stage."""
    if _is_alone():
        return ready
    flag = torch.tensor([ready], dtype=torch.int32)
    torch.distributed.all_reduce(
        flag, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(flag.item())


def log_failure(plans: list[ReusePlan]) -> None:
    """Plans could not be prepared or computed."""
    logger.exception(
        "segment reuse failed; computing in full: %s", [plan.request_id for plan in plans]
    )
