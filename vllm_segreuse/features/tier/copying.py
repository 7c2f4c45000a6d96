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
from collections.abc import Callable, Sequence

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

from vllm_segreuse.features.tier.region import HostRegion
from vllm_segreuse.features.tier.staging import GpuStreams, StagedMover
from vllm_segreuse.model.cells import StoredPage
from vllm_segreuse.plan.tiering import TierDone, TierOrders
from vllm_segreuse.prefill.mover import CopyBlocks, InPlace, Mark, Mover

logger = init_logger("vllm.segreuse")


class TierWorker:
    """One per worker of an engine with a second tier.

    Args:
        mover: carries orders out.
        weights_are_unchanged: whether the model has the weights of the start; None: without files,
            nobody asks.

    Attributes:
        mover: as given.
    """

    def __init__(
        self, mover: Mover, weights_are_unchanged: Callable[[], bool] | None = None
    ) -> None:
        self.mover = mover
        self._weights_are_unchanged = weights_are_unchanged
        self._ordered: list[int] = []
        self._failed: set[int] = set()
        self._encoded: dict[int, torch.Tensor] = {}
        self._other_weights: set[int] = set()
        self._marked: deque[tuple[int, Mark | None]] = deque()

    def begin(self, orders: TierOrders) -> None:
        """A step begins: copy what it evicts. An error costs its records, nothing else."""
        self._ordered.append(orders.sequence)
        if orders.verify and not self._verified():
            self._other_weights.add(orders.sequence)
        if not len(orders.blocks):
            return
        try:
            encoded = self.mover.store(orders.blocks, orders.rows)
            if encoded is not None:
                self._encoded[orders.sequence] = encoded
        except Exception:
            self._failed.add(orders.sequence)
            logger.exception(
                "segment reuse could not store %d blocks; they are lost", len(orders.blocks)
            )

    def _verified(self) -> bool:
        try:
            return self._weights_are_unchanged is not None and self._weights_are_unchanged()
        except Exception:
            logger.exception("segment reuse could not compare the model's weights")
            return False

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
            if sequence in self._encoded:
                places = (~self._encoded.pop(sequence)).nonzero()[:, 0].tolist()
                done.without_code |= {(sequence, place) for place in places}
        done.failed = self._failed & done.ranks.keys()
        self._failed -= done.failed
        done.other_weights = self._other_weights & done.ranks.keys()
        self._other_weights -= done.other_weights
        return done


def mover_for(
    region: HostRegion,
    copy: CopyBlocks,
    stored: Sequence[StoredPage],
    device: torch.device,
    zeroises: bool = False,
) -> Mover:
    """Between the pages of a KV cache and this rank's part of the region.

    Args:
        region: of the engine.
        copy: from the cache.
        stored: how pages of each layer are stored, in order.
        device: that has the cache.
        zeroises: whether buffers on the way are zeroed.

    Raises:
        RefusedError: pages do not fit into the region's cells.
    """
    rows = region.views(stored)
    if device.type == "cpu":
        return InPlace(copy, rows)
    pin_mmap_region(region)
    known = stored, device, region.cells(), GpuStreams(device)
    return StagedMover(copy, *known, zeroises=zeroises)


def _is_over(mark: Mark | None) -> bool:
    return mark is None or mark.query()
