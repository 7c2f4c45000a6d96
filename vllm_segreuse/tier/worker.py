# SPDX-License-Identifier: Apache-2.0
"""The workers' half of the second tier: orders come with a step, reports leave with its output.

    step begins     blocks ──► rows       before anything of the step writes pages
    plans           rows ──► pages        `prefill/align.py`
    step ends       mark                  behind both, in the order of copies
    a later end     the mark was reached: the sequence is reported

A rank reports each sequence once, also in steps without a forward. On a CPU it is the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

from vllm_segreuse.plan.tiering import TierDone, TierOrders
from vllm_segreuse.tier.mover import CopyBlocks, InPlace, Mark, Mover
from vllm_segreuse.tier.region import HostRegion
from vllm_segreuse.tier.staging import GpuStreams, Staged

logger = init_logger("vllm.segreuse")


class TierWorker:
    """One per worker of an engine with a second tier.

    Args:
        mover: carries orders out.

    Attributes:
        mover: as given.
    """

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self._ordered: list[int] = []
        self._failed: set[int] = set()
        self._marked: deque[tuple[int, Mark | None]] = deque()

    def begin(self, orders: TierOrders) -> None:
        """A step begins: copy what it evicts. An error costs its records, nothing else."""
        self._ordered.append(orders.sequence)
        if not len(orders.blocks):
            return
        try:
            self.mover.store(orders.blocks, orders.rows)
        except Exception:
            self._failed.add(orders.sequence)
            logger.exception(
                "segment reuse could not store %d blocks; they are lost", len(orders.blocks)
            )

    def end(self) -> TierDone:
        """A step ends: all that its plans read is queued.

        Returns:
            What is over, and has not been reported.
        """
        self._marked.extend((sequence, self.mover.mark()) for sequence in self._ordered)
        self._ordered.clear()
        done = TierDone()
        while self._marked and _is_over(self._marked[0][1]):
            sequence, _ = self._marked.popleft()
            done.ranks[sequence] += 1
        done.failed = self._failed & done.ranks.keys()
        self._failed -= done.failed
        return done


def mover_for(region: HostRegion, copy: CopyBlocks, pages: Sequence[torch.Tensor]) -> Mover:
    """Between the pages of a KV cache and this rank's part of the region.

    Args:
        region: of the engine.
        copy: from the cache.
        pages: `[num_blocks, page_elements]` of each layer, in order.

    Raises:
        RefusedError: pages do not fit into the region's cells.
    """
    rows, device = region.views(pages), pages[0].device
    if device.type == "cpu":
        return InPlace(copy, rows)
    pin_mmap_region(region)
    return Staged(copy, pages, region.cells(), GpuStreams(device))


def _is_over(mark: Mark | None) -> bool:
    return mark is None or mark.query()
