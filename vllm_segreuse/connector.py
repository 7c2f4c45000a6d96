# SPDX-License-Identifier: Apache-2.0
"""`SegReuseConnector`: vLLM's KV connector interface, adapted to the two halves of segment reuse.

vLLM makes one in the scheduler's process and one in each worker (`KVConnectorRole`). In the first,
`SchedulerSide` finds what each request can reuse, and plans are sent with the step; the
others pass them to `WorkerSide`, which carries them out around the step's forward. Nothing
is moved between machines. What vLLM's interface lacks is called on the scheduler's half
itself (`compat/scheduler.py`, `compat/engine_core.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.metrics import SegReusePromMetrics, SegReuseStats
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.engine.supported import check_config
from vllm_segreuse.engine.version import require_supported_vllm
from vllm_segreuse.features import having
from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.plan import Message, ModelLayers, PlanOutcome, ReusePlan

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import CacheHitSource
    from vllm.v1.request import Request

    from vllm_segreuse.features.tier.region import HostRegion
    from vllm_segreuse.prefill.worker import WorkerSide
    from vllm_segreuse.scheduling.scheduler import SchedulerSide


@dataclass
class SegReuseMetadata(KVConnectorMetadata):
    """Plans of one step; requests whose plan has been under way and is called back; messages to
    the workers' half of features, by feature."""

    plans: list[ReusePlan] = field(default_factory=list)
    called_back: list[str] = field(default_factory=list)
    messages: dict[str, Any] = field(default_factory=dict)


@dataclass
class SegReuseWorkerMetadata(KVConnectorWorkerMetadata):
    """How plans have ended, by request, where only the workers know it; messages of features."""

    outcomes: dict[str, PlanOutcome] = field(default_factory=dict)
    messages: dict[str, Message] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Tensor-parallel ranks compute the same tokens, and copy at their own pace. vLLM 0.33 may
        add what ranks reported in an earlier step that failed on another rank."""
        assert isinstance(other, SegReuseWorkerMetadata)
        messages = other.messages | self.messages
        for name in self.messages.keys() & other.messages.keys():
            messages[name] = self.messages[name].merged(other.messages[name])
        return SegReuseWorkerMetadata(other.outcomes | self.outcomes, messages)


@dataclass
class SegReuseHandshake(KVConnectorHandshakeMetadata):
    """What only the workers know of the model, and the scheduler's side needs.

    Attributes:
        layers: of the model.
        facts: for features, by feature.
    """

    layers: ModelLayers
    facts: dict[str, Any] = field(default_factory=dict)


class SegReuseConnector(KVConnectorBase_V1):
    """vLLM documents the interface (`kv_connector/v1/base.py`); here is what is particular.

    Attributes:
        scheduler_side: in the scheduler's process, once vLLM has its KV cache manager.
        worker_side: in a worker, once vLLM has the model and its KV cache.
    """

    scheduler_side: SchedulerSide
    worker_side: WorkerSide

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported_vllm()
        self._group = segment_group(kv_cache_config)
        self._config = SegReuseConfig.from_options(
            self._kv_transfer_config.kv_connector_extra_config, source="kv_connector_extra_config"
        )
        check_config(vllm_config, self._config.cuts)
        for module in having("refusals"):
            module.check(vllm_config, self._config)
        self._stats = SegReuseStats()

    @property
    def requires_kv_delivery(self) -> bool:
        """No KV is sent to another engine: a preempted request's output need not be dropped."""
        return False

    # Scheduler process.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        # Imported here: it loads numba, which workers do not need.
        from vllm_segreuse.config.in_scheduler import scheduler_side

        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side = scheduler_side(
            self._vllm_config,
            self._config,
            kv_cache_manager,
            self._stats,
            self._group,
            self._open_region(),
        )

    def _open_region(self) -> HostRegion | None:
        """Host memory of the second tier, which the workers have opened by now."""
        options = TierServer.of(self._config).tier
        if options is None:
            return None
        from vllm_segreuse.features.tier.region import open_region

        return open_region(self._vllm_config, self._kv_cache_config, options, rank=None)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """By pipeline stage and tensor-parallel rank; all ranks of a stage have the same layers."""
        stages: dict[int, ModelLayers] = {}
        for (stage, _), found in sorted(metadata.items()):
            assert isinstance(found, SegReuseHandshake)
            stages[stage] = found.layers
        layers = ModelLayers.joined(list(stages.values()))
        for found in metadata.values():
            assert isinstance(found, SegReuseHandshake)
            self.scheduler_side.learn(layers, found.facts)

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.allocated(request, self._group.of(blocks.get_block_ids()))

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Tokens that are really not computed; vLLM's hit counters take this sum (see compat)."""
        saved = self.scheduler_side.saved_tokens(request)
        return {self._cache_hit_source: saved} if saved else {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SegReuseMetadata:
        step = self.scheduler_side.take_step(scheduler_output.total_num_scheduled_tokens > 0)
        return SegReuseMetadata(*step)

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_pending_work

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        report = self.scheduler_side.finished(request, block_ids)
        return False, None if report is None else {"segreuse": report}

    def reset_cache(self) -> bool:
        """Done by the block pool's own reset, which runs before this."""
        return True

    # Worker processes.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Imported here: the scheduler's process does not need it.
        from vllm_segreuse.config.in_worker import worker_side

        self.worker_side = worker_side(
            self._vllm_config, self._config, self._kv_cache_config, self._stats
        )

    def get_handshake_metadata(self) -> SegReuseHandshake:
        """Of the workers, who have proven the model by now."""
        return SegReuseHandshake(self.worker_side.layers, self.worker_side.facts())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; vLLM calls this before anything else of it."""
        assert isinstance(kv_connector_metadata, SegReuseMetadata)
        self.worker_side.begin_step(kv_connector_metadata.messages)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if not self._step.plans:
            return
        with self._own_pass() as metadata:
            self.worker_side.before_forward(metadata.plans)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.worker_side.is_idle:  # so there is nothing to be called back
            return None, None
        with self._own_pass() as metadata:
            return None, self.worker_side.after_forward(metadata.called_back, finished_req_ids)

    @property
    def _step(self) -> SegReuseMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SegReuseMetadata)
        return metadata

    @contextmanager
    def _own_pass(self) -> Iterator[SegReuseMetadata]:
        """The step's metadata, which vLLM does not find meanwhile: the attention layers of our own
        pass must not call a connector's per-layer hooks."""
        metadata = self._step
        super().clear_connector_metadata()
        try:
            yield metadata
        finally:
            super().bind_connector_metadata(metadata)

    def build_connector_worker_meta(self) -> SegReuseWorkerMetadata | None:
        outcomes, messages = self.worker_side.take_outcomes(), self.worker_side.end_step()
        return SegReuseWorkerMetadata(outcomes, messages) if outcomes or messages else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded before the forward starts."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved: reuse reads vLLM's own cache."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # Both.

    def shutdown(self) -> None:
        """The engine ends."""
        for name in ("scheduler_side", "worker_side"):
            side: SchedulerSide | WorkerSide | None = getattr(self, name, None)
            if side is not None:
                side.close()

    def get_kv_connector_stats(self) -> SegReuseStats | None:
        return None if self._stats.is_empty() else self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SegReuseStats:
        return SegReuseStats() if data is None else SegReuseStats(data=data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> SegReusePromMetrics:
        return SegReusePromMetrics(*args, **kwargs)


class SegReuseHybridConnector(SegReuseConnector, SupportsHMA):
    """The same beside vLLM's hybrid KV cache manager, where a request has a block table for each KV
    cache group.

    A class of its own: by its interface vLLM would turn that manager on wherever nobody has said
    whether to (`config/launch.py`).
    """

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tables = blocks.get_block_ids()
        others = self._group.of_others(tables)
        self.scheduler_side.allocated(request, self._group.of(tables), others)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, self._group.of(block_ids))
