# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the second tier."""

from __future__ import annotations

from vllm_segreuse.plan import TierDone, TierOrders
from vllm_segreuse.prefill.feature import WorkerFeature
from vllm_segreuse.tier.worker import TierWorker


class TierCopying(WorkerFeature):
    """Of one worker.

    Args:
        worker: carries orders out.
    """

    name = "tier"

    def __init__(self, worker: TierWorker) -> None:
        self._worker = worker

    def begin_step(self, message: TierOrders | None) -> None:
        """Before anything of a step writes pages: store what it evicts."""
        if message is not None:
            self._worker.begin(message)

    def end_step(self) -> TierDone | None:
        """Orders that are over since the last call."""
        return self._worker.end() or None
