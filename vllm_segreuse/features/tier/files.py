# SPDX-License-Identifier: Apache-2.0
"""A store of files as a secondary tier of vLLM's `TieringOffloadingManager` (v1/kv_offload)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from segreuse_store import (
    FileStore,
    Owner,
    RecordFolder,
    StoredRecord,
    StoreOptions,
    record_bytes,
    sealer_of,
)
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.record import namespaces_of

logger = logging.getLogger("vllm.segreuse")

MIN_RECORDS = 16
"""A budget of fewer is no use."""

_KINDS = {"raw": 0, "int8": 1, "fp8": 2}
"""Numbers of the codecs in files."""


class FileTier(SecondaryTierManager):
    """A store behind vLLM's manager, which calls every method in the scheduler's thread.

    Args:
        primary_kv_view: the host region, `[rows, row_bytes]`.
        store: of the same rows.
    """

    medium = Medium.STORAGE

    def __init__(self, primary_kv_view: memoryview, store: FileStore) -> None:
        super().__init__(None, primary_kv_view, "segreuse_files")
        self._store = store

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS, from memory."""
        return LookupResult.HIT if self._store.lookup(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Stores what is new, may be stored, and has room."""
        rows = job_metadata.chunk_ids.tolist()
        self._store.submit_store(job_metadata.job_id, job_metadata.keys, rows)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fills rows with records, each verified before."""
        rows = job_metadata.chunk_ids.tolist()
        self._store.submit_load(job_metadata.job_id, job_metadata.keys, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What is over since the last call."""
        return [
            JobResult(job_id, success, [*map(OffloadKey, keys)], seconds)
            for job_id, success, keys, seconds in self._store.get_finished_jobs()
        ]

    def has_pending_work(self) -> bool:
        """Whether a job is not reported yet."""
        return self._store.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What has come to be on disk, and what is no longer."""
        return [
            OffloadingEvent([*map(OffloadKey, event.keys)], Medium.STORAGE, event.removed)
            for event in self._store.take_events()
        ]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The records were used."""
        self._store.touch(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing is kept of requests."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Waits until all jobs are over, or abandoned at their deadline."""
        self._store.drain_jobs()

    def shutdown(self) -> None:
        """Stores what was to be stored, and ends the use of the store."""
        self._store.shutdown()


def open_files(
    options: TierOptions,
    primary_kv_view: memoryview,
    fingerprint: bytes,
    describe: Callable[[bytes], StoredRecord | None],
    owner: Owner | None = None,
    on_erased: Callable[[list[bytes]], None] = lambda keys: None,
) -> FileStore:
    """The store that the options describe; they have a `path`.

    Args:
        options: of the tier.
        primary_kv_view: the host region, `[rows, row_bytes]`.
        fingerprint: of the model.
        describe: see `FileStore`.
        owner: the engine, as it is known after a restart.
        on_erased: see `FileStore`.

    Raises:
        RefusedError: the files cannot be kept; says why and what to do.
    """
    assert options.path is not None
    assert primary_kv_view.strides is not None
    row_bytes = primary_kv_view.strides[0]
    size = record_bytes(row_bytes)
    if options.disk_bytes < MIN_RECORDS * size:
        raise RefusedError(
            f"tier.disk_gib is {options.disk_gib:g}, which holds {options.disk_bytes // size} "
            f"records of {size / (1 << 20):.1f} MiB; give it room for {MIN_RECORDS} at least"
        )
    try:
        sealer = sealer_of(options.key_file)
        kind = _KINDS[options.codec]
        folder = RecordFolder(options.path, fingerprint, row_bytes, sealer, kind=kind, owner=owner)
        given = StoreOptions(options.disk_bytes, options.io_threads, options.zeroise)
        store = FileStore(primary_kv_view, folder, given, describe, on_erased, namespaces_of)
        store.journal()  # opened here: it may be what is wrong
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"the second tier's files cannot be kept in {options.path}: {error}; correct this, or "
            "start without tier.path"
        ) from error
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"the second tier's files need the package {error.name}: install vllm-segreuse[tier]"
        ) from error
    logger.info(
        "segment reuse: %d records in %s, %s",
        store.num_records,
        folder.path,
        "encrypted" if sealer.algorithm else "not encrypted",
    )
    return store
