# SPDX-License-Identifier: Apache-2.0
"""The second tier of an engine of vLLM, from its region of host memory."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from vllm_segreuse.cache.health import Health
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.tier.catalogue import RecordCatalogue
from vllm_segreuse.tier.files import open_file_tier
from vllm_segreuse.tier.host_rows import HostRows
from vllm_segreuse.tier.naming import exact_key, record_keys
from vllm_segreuse.tier.seats import Owner
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
    fingerprint: bytes | None = None,
    owner: Owner | None = None,
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
        fingerprint: of the model, 1 to 64 bytes; needed for files. None: the records are this
            process's alone.
        owner: the engine, as it is known after a restart.

    Raises:
        RefusedError: files cannot be kept where the options say.
    """
    rows = HostRows(region, options.zeroise)
    files, journal = None, None
    if options.path is not None:
        assert fingerprint is not None, "what is on disk is a model's"
        view = rows.get_kv_memoryview()
        files = open_file_tier(
            options,
            view,
            fingerprint,
            describe=lambda key: store.describe(key),
            owner=owner,
            on_erased=lambda keys: store.erased_elsewhere(keys),
        )
        journal = files.journal()
    manager = TieringOffloadingManager(rows, [] if files is None else [files])
    domain = fingerprint or os.urandom(32)
    key_of = record_keys(domain, pool.name_of)
    catalogue = RecordCatalogue(index, namespaces, pool.num_gpu_blocks, key_of)
    known = (manager, rows, catalogue, ranks, options, health, stats, time.monotonic)
    looked_up = None if options.is_lossy else partial(exact_key, domain)
    store: TierStore = TierStore(*known, files, journal, looked_up)
    return store
