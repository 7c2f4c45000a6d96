# SPDX-License-Identifier: Apache-2.0
"""The load of `bench soak` on a pool that is too small, with a second tier that is too small, too.

What a worker copies to a row is remembered as a digest, and compared with what the row holds
whenever a plan reads it. When all is over, no request and no step may hold a row, each record has
one, and there are no more of them than rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch

from bench import engine, harness, shapes
from bench.suites.soak import (
    FULL,
    NUM_BLOCKS,
    RUNNING,
    SHAPE,
    SPREAD_TOKENS,
    Soak,
)

HOST_GIB = 0.002
"""More blocks than the pool has, fewer than the documents take."""


class Ledger:
    """A mover that remembers what it stored.

    Args:
        mover: does the work (`prefill/mover.py`).
        pages: of the KV cache, `[num_blocks, page_elements]` of each layer.
        rows: the same layers' views of the host region.

    Attributes:
        stored, read: rows that were written and read.
        wrong: rows that did not hold what was written last.
    """

    def __init__(self, mover: Any, pages: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
        self._mover, self._pages, self._rows = mover, pages, rows
        self._digests: dict[int, bytes] = {}
        self.stored = self.read = self.wrong = 0

    def store(self, blocks: Any, rows: Any) -> None:
        """Of `Mover`; digests are of the blocks, not of the rows."""
        self._mover.store(blocks, rows)
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            self._digests[row] = _digest(self._pages, block)
        self.stored += len(rows)

    def load(self, rows: Any) -> Iterator[Any]:
        """Of `Mover`."""
        self.read += len(rows)
        self.wrong += sum(self._digests.get(row) != _digest(self._rows, row) for row in rows)
        return iter(self._mover.load(rows))

    def mark(self) -> Any:
        """Of `Mover`."""
        return self._mover.mark()

    def close(self) -> None:
        """Of `Mover`."""
        self._mover.close()


def _digest(pages: list[torch.Tensor], which: int) -> bytes:
    found = blake2b(digest_size=16)
    for layer in pages:
        found.update(layer[which].contiguous().view(torch.uint8).numpy())
    return found.digest()


def _ledger(connector: Any) -> Ledger:
    aligner = connector.worker_side.backlog.prefill.aligner
    pages: dict[int, torch.Tensor] = {}
    for group in aligner._groups:
        pages |= zip(group.layers, group.pages, strict=True)
    mover = aligner.host_rows
    return Ledger(mover, [pages[layer] for layer in sorted(pages)], mover._rows)


def soak(requests: int) -> harness.SuiteResult:
    """So many requests; see `bench.suites.soak`."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))
    engine.prepare_environment(1)
    with engine.engine(
        shapes.make_model(SHAPE),
        segreuse={"spread_tokens": SPREAD_TOKENS, "tier": {"host_gib": HOST_GIB}},
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=RUNNING,
        enforce_eager=True,
    ) as llm:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = llm.llm_engine.engine_core.engine_core
        from vllm_segreuse.features.tier.worker import TierCopying

        side, ledger = get_kv_transfer_group().worker_side, _ledger(get_kv_transfer_group())
        (tier,) = [it for it in side.features if isinstance(it, TierCopying)]
        prefill = side.backlog.prefill
        side.backlog.prefill = prefill.with_aligner(prefill.aligner.reading(ledger))
        tier.worker.mover = ledger
        load = FULL._replace(requests=requests, warm_up=min(FULL.warm_up, requests // 10))
        running = Soak(llm.llm_engine, load)
        running.run()
        result = running.result()
        # Reports of the last steps come with the output of a later one.
        engine.first_token(llm, list(range(300, 340)))
        counts = core.scheduler.connector.scheduler_side.status()["tier"]
    keep = ("leaked_blocks", "hung_requests", "failed_requests", "contained_errors")
    summary = {f"soak_{name}": result["summary"][name] for name in (*keep, "requests")}
    summary |= {
        "leaked_records": sum(counts[name] for name in ("holds", "steps", "jobs")),
        "wrong_bytes_served": ledger.wrong,
        "soak_rows_stored": ledger.stored,
        "soak_rows_read": ledger.read,
    }
    return {"rows": [{"part": "soak", **row} for row in result["rows"]], "summary": summary}
