# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the second tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from vllm.distributed import get_tp_group

from vllm_segreuse.compat.model_runner import loaded_model
from vllm_segreuse.features.tier.copying import TierWorker, mover_for
from vllm_segreuse.features.tier.options import TierOptions, TierServer
from vllm_segreuse.features.tier.region import HostRegion, open_region
from vllm_segreuse.model.weights import ModelWeights
from vllm_segreuse.plan import TierDone, TierOrders
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.feature import MakingWorker, WorkerFeature

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class TierCopying(WorkerFeature):
    """Of one worker.

    Args:
        worker: carries orders out.
        region: of host memory.
    """

    name = "tier"

    def __init__(self, worker: TierWorker, region: HostRegion) -> None:
        self.worker = worker
        self.region = region
        self._is_open = True

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: TierOptions,
        aligner: Aligner,
    ) -> Self:
        """That of a worker whose pages `aligner` copies; see `Aligner.reading`."""
        region = open_region(vllm_config, kv_cache_config, options, get_tp_group().rank_in_group)
        mover = mover_for(
            region,
            aligner.copy_blocks,
            aligner.stored_pages(),
            aligner.device,
            zeroises=options.zeroise,
        )
        unchanged = None if options.path is None else ModelWeights(loaded_model()).are_unchanged
        return cls(TierWorker(mover, unchanged), region)

    def carried_out_by(self, prefill: SparsePrefill) -> SparsePrefill:
        """One whose aligner reads rows of host memory, too."""
        return prefill.with_aligner(prefill.aligner.reading(self.worker.mover))

    def begin_step(self, message: TierOrders | None) -> None:
        """Before anything of a step writes pages: store what it evicts."""
        if message is not None and self._is_open:
            self.worker.begin(message)

    def end_step(self) -> TierDone | None:
        """Orders that are over since the last call."""
        return (self.worker.end() or None) if self._is_open else None

    def close(self) -> None:
        """Give host memory back."""
        if self._is_open:
            self._is_open = False
            self.worker.mover.close()
            self.region.cleanup()


def start(making: MakingWorker) -> TierCopying | None:
    """That of a worker; None: there is no second tier."""
    options = TierServer.of(making.config).tier
    if options is None:
        return None
    aligner = making.runtime.prefill.aligner
    return TierCopying.of(making.vllm_config, making.kv_cache_config, options, aligner)
