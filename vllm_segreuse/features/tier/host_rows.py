# SPDX-License-Identifier: Apache-2.0
"""Rows of host memory: vLLM's, with two additions that it lacks.

- Records that were erased leave host memory as soon as nobody uses their rows.
- With `tier.zeroise`, a row is zeroed when it becomes free, before anything else can get it.

A row is free once no rank and no I/O thread reads or writes it: vLLM counts these. A reset frees
all rows at once, whoever uses them; they are zeroed when the ranks have reported what they had
begun (`store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class HostRows(CPUPrimaryTierOffloadingManager):
    """One per engine, with events; in the scheduler's thread.

    Args:
        region: whose rows these are.
        zeroises: whether rows are zeroed, and erased records leave.

    Attributes:
        zeroises: as given.
    """

    def __init__(self, region: SharedOffloadRegion, zeroises: bool = False) -> None:
        super().__init__(region.num_chunks, region, enable_events=True)
        self.zeroises = zeroises
        self._forgotten = 0  # rows below were in use before the last reset
        self._erased: set[OffloadKey] = set()

    @property
    def chunks(self) -> Mapping[OffloadKey, ChunkStatus]:
        """vLLM's state of every row that is taken, by the key of its record."""
        found: Mapping[OffloadKey, ChunkStatus] = self._policy.chunks
        return found

    @property
    def num_replaceable(self) -> int:
        """Rows whose records nobody reads or writes: others may take their place."""
        return int(self._num_evictable_cache_chunks)

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        if self.zeroises:
            np.asarray(self._kv_memoryview)[chunk.chunk_id] = 0
        super()._free_chunk(chunk)

    def reset_cache(self) -> None:
        """Forget everything. The rows still hold what they held: `wipe`."""
        self._forgotten = max(self._forgotten, self._num_allocated_chunks)
        self._erased.clear()
        super().reset_cache()

    def wipe(self) -> None:
        """Zero all that was there before the last reset. Nobody may use any row."""
        if self.zeroises and self._forgotten:
            np.asarray(self._kv_memoryview)[: self._forgotten] = 0
        self._forgotten = 0

    def shutdown(self) -> None:
        """The engine ends; the workers have ended."""
        self.reset_cache()
        self.wipe()
        super().shutdown()

    # Erasure.

    @property
    def has_erased(self) -> bool:
        """Whether rows of erased records are still in use."""
        return bool(self._erased)

    def is_erased(self, key: bytes) -> bool:
        """Whether a record was erased while its row is in use."""
        return key in self._erased

    def erase(self, keys: Iterable[bytes]) -> None:
        """Records leave host memory as soon as nobody uses their rows; others are no error."""
        if self.zeroises:
            self._erased |= {OffloadKey(key) for key in keys}
            self.sweep()

    def keep(self, keys: Iterable[bytes]) -> None:
        """Records are wanted again."""
        self._erased.difference_update(map(OffloadKey, keys))

    def sweep(self) -> None:
        """Free the rows of erased records that nobody uses any more."""
        idle = []
        for key in list(self._erased):
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt != 0:
                continue
            self._erased.remove(key)
            if chunk is not None:
                self._policy.remove(key)
                self._num_evictable_cache_chunks -= 1
                self._free_chunk(chunk)
                idle.append(key)
        if idle and self.events is not None:
            self.events.append(OffloadingEvent(idle, self.medium, removed=True))
