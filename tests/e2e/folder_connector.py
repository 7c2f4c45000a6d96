# SPDX-License-Identifier: Apache-2.0
"""A transfer connector that hands blocks over through a folder, by the id of the request: it speaks
with vLLM as NIXL's does, and runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class Load:
    """Blocks to fill with the last ones of a file."""

    file: str
    block_ids: list[int]


@dataclass
class FolderMetadata(KVConnectorMetadata):
    loads: dict[str, Load] = field(default_factory=dict)
    sends: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class FolderReport(KVConnectorWorkerMetadata):
    written: list[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, FolderReport)
        return FolderReport(self.written + other.written)


@dataclass
class FolderHandshake(KVConnectorHandshakeMetadata):
    num_layers: int


class FolderStats(KVConnectorStats):
    """How many blocks were moved."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> FolderStats:
        self.data = {"blocks": self.data.get("blocks", 0) + other.data.get("blocks", 0)}
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data.get("blocks")


class FolderProm(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, types: Any, labels: list[str], values: Any) -> None:
        super().__init__(vllm_config, types, labels, values)
        self.blocks = types[Counter](
            name="vllm:folder_blocks", documentation="Blocks.", labelnames=labels
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self.blocks.labels(*labels).inc(transfer_stats_data["blocks"])


class FolderConnector(KVConnectorBase_V1):
    """Options: `folder`; `steps`, that a load takes; `reports_blocks`: a load that fails names its
    blocks, not its request."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self.folder = Path(options["folder"])
        self.steps = options.get("steps", 1)
        self.reports_blocks = options.get("reports_blocks", False)
        # Scheduler.
        self.next = FolderMetadata()
        self.handshakes: dict[Any, Any] = {}
        self.reports: list[FolderReport] = []
        self.heard: dict[str, set[str]] = {"loaded": set(), "sent": set()}
        # Worker.
        self.pages: dict[str, torch.Tensor] = {}
        self.under_way: dict[str, tuple[Load, int]] = {}
        self.written: list[str] = []
        self.filled: dict[str, list[int]] = {}
        self.failed_blocks: set[int] = set()
        self.stats = FolderStats()

    # Scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.handshakes |= metadata

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = request.num_prompt_tokens - num_computed_tokens
        return max(count, 0), count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            if num_external_tokens:
                load = Load(params["remote_request_id"], blocks.get_unhashed_block_ids())
                self.next.loads[request.request_id] = load

    def build_connector_meta(self, scheduler_output: Any) -> FolderMetadata:
        found, self.next = self.next, FolderMetadata()
        return found

    def update_connector_output(self, connector_output: Any) -> None:
        self.heard["loaded"] |= connector_output.finished_recving or set()
        self.heard["sent"] |= connector_output.finished_sending or set()
        if connector_output.kv_connector_worker_meta is not None:
            self.reports.append(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status not in ANSWERED:
            return False, None
        self.next.sends[request.request_id] = block_ids
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": request.request_id,
        }

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.pages = kv_caches

    def get_handshake_metadata(self) -> FolderHandshake:
        return FolderHandshake(len(self.pages))

    def by_block(self, pages: torch.Tensor) -> torch.Tensor:
        """The same memory, with the block's number first."""
        return pages.movedim(pages.shape.index(self._kv_cache_config.num_blocks), 0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FolderMetadata)
        for request_id, load in metadata.loads.items():
            self.under_way[request_id] = (load, self.steps)
        for request_id, block_ids in metadata.sends.items():
            content = {name: self.by_block(it)[block_ids] for name, it in self.pages.items()}
            torch.save(content, self.folder / request_id)
            self.written.append(request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults(finished_sending=set(self.written))
        for request_id, (load, steps) in list(self.under_way.items()):
            self.under_way[request_id] = (load, steps - 1)
            if steps > 1:
                continue
            del self.under_way[request_id]
            results.finished_recving.add(request_id)
            if not self._fill(load):
                if self.reports_blocks:
                    self.failed_blocks.update(load.block_ids)
                else:
                    results.failed_recving.add(request_id)
        return results

    def _fill(self, load: Load) -> bool:
        file = self.folder / load.file
        if not file.exists():
            return False
        content = torch.load(file)
        self.filled[load.file] = load.block_ids
        for name, pages in self.pages.items():
            self.by_block(pages)[load.block_ids] = content[name][-len(load.block_ids) :]
        self.stats.data = {"blocks": self.stats.data.get("blocks", 0) + len(load.block_ids)}
        return True

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self.failed_blocks = self.failed_blocks, set()
        return found

    def build_connector_worker_meta(self) -> FolderReport | None:
        written, self.written = self.written, []
        return FolderReport(written) if written else None

    def get_kv_connector_stats(self) -> FolderStats | None:
        if self.stats.is_empty():
            return None
        found, self.stats = self.stats, FolderStats()
        return found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FolderStats:
        return FolderStats() if data is None else FolderStats(data=data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> FolderProm:
        return FolderProm(*args)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole blocks are filled."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Whole blocks are written."""

    def wait_for_save(self) -> None:
        """They are written when the request has ended."""
