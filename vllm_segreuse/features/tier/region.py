# SPDX-License-Identifier: Apache-2.0
"""The host region: memory that the scheduler's process and all workers of an engine map.

    row 0   | cell of rank 0: layer 0 | layer 1 | ... | pad | cell of rank 1: ... |
    row 1   | ...

A row holds one KV block: all its layers, of all ranks (`model/cells.py` says how they lie there).
The region is vLLM's `SharedOffloadRegion` (`v1/kv_offload/cpu/shared_offload_region.py`), a file in
/dev/shm. Workers open it while vLLM registers their KV caches, and the scheduler's process opens it
after them. That process removes the file's name at once, so the memory is free again when the last
process has ended, in whatever way. A worker that ends before that removes the name itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.cells import StoredPage, cell_content_bytes, views

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_segreuse.features.tier.options import TierOptions

ALIGNMENT_BYTES = 4096
"""Cells begin at a multiple of it: files may then be read and written past the page cache."""

MIN_ROWS = 16
"""A region of fewer is no use."""


class RegionShape(NamedTuple):
    """How large a region is, and how it is divided.

    Attributes:
        rows: KV blocks that it holds.
        cell_bytes: of one rank's part of a row.
        ranks: tensor-parallel ranks.
    """

    rows: int
    cell_bytes: int
    ranks: int

    @property
    def row_bytes(self) -> int:
        """Of one KV block: all layers, all ranks."""
        return self.cell_bytes * self.ranks

    @property
    def num_bytes(self) -> int:
        """Of the region."""
        return self.rows * self.row_bytes


def region_shape(
    kv_cache_config: KVCacheConfig, ranks: int, host_gib: float, codec: Codec = Codec.RAW
) -> RegionShape:
    """The region that fits into so much memory; the same in every process of an engine.

    Args:
        kv_cache_config: vLLM's, of one rank; all ranks have as many blocks of as many bytes.
        ranks: tensor-parallel ranks.
        host_gib: most memory for all of them.
        codec: how pages are stored.

    Raises:
        RefusedError: fewer rows than `MIN_ROWS` fit, or the codec cannot store the pages.
    """
    content_bytes = cell_content_bytes(kv_cache_config, codec)
    cell_bytes = -(-content_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    shape = RegionShape(int(host_gib * (1 << 30)) // (cell_bytes * ranks), cell_bytes, ranks)
    if shape.rows < MIN_ROWS:
        raise RefusedError(
            f"tier.host_gib is {host_gib:g}, which holds {shape.rows} KV blocks of "
            f"{shape.row_bytes / (1 << 20):.1f} MiB; give it room for {MIN_ROWS} at least"
        )
    return shape


class HostRegion(SharedOffloadRegion):
    """One process's map of the region.

    Args:
        name: of the region, equal in all processes of the engine and in no other's.
        shape: of the region.
        rank: of the worker; None in the scheduler's process.
        available_bytes: host memory that is available.

    Raises:
        RefusedError: it does not fit into memory or /dev/shm; or the scheduler's process finds no
            region of the workers.
    """

    def __init__(
        self, name: str, shape: RegionShape, rank: int | None, available_bytes: int | None = None
    ) -> None:
        self.shape = shape
        available = (
            psutil.virtual_memory().available if available_bytes is None else available_bytes
        )

        def check_memory(wanted: int) -> None:
            if wanted > available:
                raise MemoryError(f"{available / (1 << 30):.1f} GiB of memory are available")

        try:
            super().__init__(
                name,
                shape.rows,
                rank,
                shape.row_bytes,
                shape.cell_bytes,
                creator_memory_check=check_memory,
            )
        except (MemoryError, OSError, RuntimeError) as error:
            _remove(path_of(name))
            raise RefusedError(
                f"the host tier's {shape.num_bytes / (1 << 30):.1f} GiB cannot be had ({error}); "
                "lower tier.host_gib"
            ) from error
        # Children of multiprocessing run these at their end, but no functions of `atexit`.
        self._remove_name = Finalize(None, _remove, (self.mmap_path,), exitpriority=1)
        if rank is None:
            alone = self._creator
            self.remove_name()
            if alone:
                self.cleanup()
                raise RefusedError(
                    "the workers' host region is not on this machine; the tier needs an engine "
                    "whose processes share /dev/shm"
                )

    def remove_name(self) -> None:
        """Remove the file's name; maps of it stay."""
        self._creator = False
        self._remove_name()

    def cleanup(self) -> None:
        """Give everything back. Tensors of `views` must be gone."""
        self.remove_name()
        super().cleanup()

    def views(self, stored: Sequence[StoredPage]) -> list[torch.Tensor]:
        """This rank's part of the region as pages of its layers: `cells.views`.

        Raises:
            RefusedError: pages do not fit into a cell.
        """
        return views(self.cells(), stored)

    def cells(self) -> torch.Tensor:
        """This rank's part of every row, int8 `[rows, cell_bytes]`."""
        assert self.rank is not None
        rows = self.base_tensor.view(self.shape.rows, self.shape.row_bytes)
        return rows.narrow(1, self.rank * self.shape.cell_bytes, self.shape.cell_bytes)


def region_name(vllm_config: VllmConfig) -> str:
    """Of an engine; replicas of data parallelism have one each."""
    return f"segreuse_{vllm_config.kv_transfer_config.engine_id}_{vllm_config.instance_id}"


def path_of(name: str) -> str:
    """Where the region's file lies while it has a name, as vLLM chooses it."""
    return f"/dev/shm/vllm_offload_{name}.mmap"


def open_region(
    vllm_config: VllmConfig, kv_cache_config: Any, options: TierOptions, rank: int | None
) -> HostRegion:
    """An engine's region, mapped into this process.

    Args:
        vllm_config, kv_cache_config: the engine's.
        options: of the tier.
        rank: of the worker; None in the scheduler's process, which comes last.

    Raises:
        RefusedError: see `region_shape` and `HostRegion`.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    shape = region_shape(kv_cache_config, ranks, options.host_gib, Codec(options.codec))
    return HostRegion(region_name(vllm_config), shape, rank)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
