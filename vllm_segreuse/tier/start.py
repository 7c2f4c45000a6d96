# SPDX-License-Identifier: Apache-2.0
"""The second tier of an engine of vLLM, from its region of host memory."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from vllm_segreuse.cache.health import Health
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.supported import RefusedError
from vllm_segreuse.tier.catalogue import Catalogue
from vllm_segreuse.tier.encryption import KEY_ENV, Aes256Gcm, master_key
from vllm_segreuse.tier.files import FileTier
from vllm_segreuse.tier.folder import RecordFolder
from vllm_segreuse.tier.naming import record_keys
from vllm_segreuse.tier.store import TierStore
from vllm_segreuse.tier_options import TierOptions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def most_records(region: SharedOffloadRegion, options: TierOptions) -> int:
    """Records that host memory and files hold together, at most."""
    row_bytes = region.total_size_bytes // region.num_chunks
    return region.num_chunks + options.disk_bytes // row_bytes


def start_tier(
    region: SharedOffloadRegion,
    options: TierOptions,
    ranks: int,
    pool: SegmentBlockPool,
    index: SegmentIndex,
    namespaces: NamespaceTable,
    health: Health,
    stats: SegReuseStats,
    files: RecordFolder | None = None,
    fingerprint: bytes | None = None,
) -> TierStore:
    """The tier of an engine.

    Args:
        region: whose rows hold the records.
        options: of the tier.
        ranks: tensor-parallel ranks.
        pool: whose blocks are stored.
        index: with ids for `most_records` behind those of the pool's blocks.
        namespaces: of the ids in the index.
        health: of segment reuse.
        stats: counts what happens.
        files: that records are written to as well.
        fingerprint: of the model, 1 to 64 bytes; None: its records are this process's alone.
    """
    primary = CPUPrimaryTierOffloadingManager(region.num_chunks, region, enable_events=True)
    behind = None
    if files is not None:
        view = primary.get_kv_memoryview()
        threads = options.io_threads
        behind = FileTier(view, files, options.disk_bytes, lambda key: store.describe(key), threads)
    manager = TieringOffloadingManager(primary, [] if behind is None else [behind])
    key_of = record_keys(fingerprint or os.urandom(32), pool.name_of)
    catalogue = Catalogue(index, namespaces, pool.num_gpu_blocks, key_of)
    store = TierStore(manager, catalogue, ranks, options, health, stats, time.monotonic, behind)
    return store


def open_folder(
    region: SharedOffloadRegion, options: TierOptions, fingerprint: bytes
) -> RecordFolder:
    """The files of a model, encrypted if there is a key.

    Raises:
        RefusedError: the folder cannot be used, or the key is none.
    """
    assert options.path is not None
    sealer = None
    try:
        if options.key_file is not None or KEY_ENV in os.environ:
            sealer = Aes256Gcm(master_key(options.key_file, os.environ))
        row_bytes = region.total_size_bytes // region.num_chunks
        return RecordFolder(options.path, fingerprint, row_bytes, sealer)
    except (OSError, ValueError) as error:
        raise RefusedError(f"the folder of tier.path cannot be used: {error}") from error
