# SPDX-License-Identifier: Apache-2.0
"""The second tier of an engine of vLLM, from its region of host memory."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from segreuse_store import Owner
from vllm_segreuse.features.knowledge.options import KnowledgeOptions
from vllm_segreuse.features.tier.catalogue import RecordCatalogue
from vllm_segreuse.features.tier.files import FileTier, open_files
from vllm_segreuse.features.tier.fingerprint import model_fingerprint
from vllm_segreuse.features.tier.host_rows import HostRows
from vllm_segreuse.features.tier.naming import exact_key, record_keys
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.store import RecordPlaces, TierStore
from vllm_segreuse.scheduling.core import Core

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def most_records(region: SharedOffloadRegion, options: TierOptions) -> int:
    """Records that host memory and files hold together, at most."""
    row_bytes = region.total_size_bytes // region.num_chunks
    return region.num_chunks + options.disk_bytes // row_bytes


def start_tier(core: Core, options: TierOptions, region: SharedOffloadRegion) -> TierStore:
    """The tier of an engine.

    Args:
        core: of the engine. Its index has ids for `most_records` behind those of the pool's blocks.
        options: of the tier.
        region: whose rows hold the records.

    Raises:
        RefusedError: files cannot be kept where the options say.
    """
    rows = HostRows(region, options.zeroise)
    view, domain, files = rows.get_kv_memoryview(), os.urandom(32), None
    if options.path is not None:
        domain = model_fingerprint(core.vllm_config, core.group, options.codec)
        rank = core.vllm_config.parallel_config.data_parallel_index
        files = open_files(
            options,
            view,
            domain,
            describe=lambda key: store.describe(key),
            owner=Owner(KnowledgeOptions.of(core.config).knowledge_path, rank),
            on_erased=lambda keys: store.erased_elsewhere(keys),
        )
    manager = TieringOffloadingManager(rows, [] if files is None else [FileTier(view, files)])
    catalogue = RecordCatalogue(
        core.index,
        core.namespaces,
        core.pool.num_gpu_blocks,
        record_keys(domain, core.pool.name_of),
        None if options.is_lossy else partial(exact_key, domain),
    )
    store: TierStore = TierStore(
        RecordPlaces(manager, rows, files, None if files is None else files.journal()),
        catalogue,
        core.vllm_config.parallel_config.tensor_parallel_size,
        options,
        core.health,
        core.stats,
        time.monotonic,
    )
    return store
