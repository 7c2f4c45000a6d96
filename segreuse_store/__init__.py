# SPDX-License-Identifier: Apache-2.0
"""A shared, crash-safe, budgeted, encrypted store of opaque records in files.

A record is a key of 32 bytes, a payload in a row of host memory, what its owner knows `about` it,
and whether it is durable. The store looks into neither payload nor `about`, and knows nothing of
segments: `vllm_segreuse` imports it, and it imports nothing from there, neither torch nor vLLM.

    file_store    `FileStore`, the face of it: what there is, jobs, budget, erasures
    folder        files and rows that agree, whoever is killed, and whenever
    database      rows of all engines: budget, order of removal, who holds what
    leases        which engines run, and what those that stopped have left
    format        a file of a record; `sealing` and `encryption` prove it
    residents     what the database is known to have, without a system call
    jobs          transfers with a deadline; `io_threads` run them
    erasures      what is to leave for good; `watching` follows other engines
    journal       which records the owner's groups consist of
    disk, sqlite  the system calls

Beside vLLM's `SecondaryTierManager` (v1/kv_offload/tiering/base.py), which `fs`, `obj` and `p2p`
are of:

    vLLM                           `FileStore`
    lookup(key, context)           lookup(key): True for HIT, False for MISS; never RETRY
    submit_store(TransferJob)      submit_store(job_id, keys, rows)
    submit_load(TransferJob)       submit_load(job_id, keys, rows)
    get_finished_jobs()            get_finished_jobs(): the same fields but for the bytes
    take_events()                  take_events(): keys, and whether they were removed
    touch(keys, context)           touch(keys)
    has_pending_work()             has_pending_work()
    drain_jobs(), shutdown()       drain_jobs(), shutdown()
    on_new_request(context), ...   nothing: no state is of a request

`vllm_segreuse/features/tier/files.py` is the adapter, so a server of vLLM's could have this store,
too. The half of the second tier that knows segments asks more of a tier only where it has files of
its own: behind vLLM's manager any tier of vLLM's can be in its place. What vLLM's interface
lacks:

- a **budget**: `fs` grows until the disk is full. Here all engines share one, and the least
  recently used records make room (`num_slots`, `used_bytes`).
- a **checksum**: what was torn, exchanged or changed is a miss here, and is removed.
- an **order of syncs**: a record is there once its file and its folder are on the device.
- **erasure**: `erase` removes a record, and its key if it is encrypted, unless another engine holds
  it; `set_durable` says what this one holds.
- **several engines**: `claim` and `take_events` tell what others have written or removed, and a
  running engine ends what a killed one has begun.
- **what is wanted**: `take_wanted` names durable records that could not be written before, and
  `hide` and `reveal` bridge the time in which the model may have other weights.
"""

from segreuse_store.file_store import FileStore, StoreEvent, StoreOptions, sealer_of
from segreuse_store.folder import LostError, RecordFolder
from segreuse_store.format import StoredRecord, record_bytes
from segreuse_store.jobs import JobResult
from segreuse_store.journal import GroupJournal, GroupPart
from segreuse_store.leases import Owner

__all__ = [
    "FileStore",
    "GroupJournal",
    "GroupPart",
    "JobResult",
    "LostError",
    "Owner",
    "RecordFolder",
    "StoreEvent",
    "StoreOptions",
    "StoredRecord",
    "record_bytes",
    "sealer_of",
]
