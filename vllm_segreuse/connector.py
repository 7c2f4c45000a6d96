# SPDX-License-Identifier: Apache-2.0
"""`SegReuseConnector`: segment reuse behind vLLM's KV connector interface.

One class, two lives (vLLM `KVConnectorRole`). In the scheduler process it asks what each request
can reuse (`scheduler.py`, `cache/`) and sends the plans along with the step; in the workers it
carries them out before the step's forward, the largest behind that and the following ones
(`prefill/`). It moves nothing between machines or to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.metrics import SegReusePromMetrics, SegReuseStats
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.supported import check_config, check_kv_cache
from vllm_segreuse.version import require_supported_vllm

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import CacheHitSource
    from vllm.v1.request import Request

    from vllm_segreuse.prefill.backlog import Backlog
    from vllm_segreuse.prefill.executor import PassReport
    from vllm_segreuse.scheduler import SchedulerSide

logger = init_logger("vllm.segreuse")


@dataclass
class SegReuseMetadata(KVConnectorMetadata):
    """Plans of one step; requests whose plan has been under way and is called back."""

    plans: list[ReusePlan] = field(default_factory=list)
    called_back: list[str] = field(default_factory=list)


@dataclass
class SegReuseWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers computed of plans, where only they could tell (`PassReport.computed`)."""

    computed: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Tensor-parallel ranks compute the same tokens."""
        return self


class SegReuseConnector(KVConnectorBase_V1):
    """vLLM documents the interface (`kv_connector/v1/base.py`); here is what is particular."""

    # Set by the hook that vLLM calls in the process concerned, and nowhere else.
    _scheduler: SchedulerSide
    _backlog: Backlog | None = None

    _computed: dict[str, int]

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported_vllm()
        check_config(vllm_config)
        check_kv_cache(kv_cache_config, vllm_config.cache_config.block_size)
        self._config = SegReuseConfig.from_options(
            self._kv_transfer_config.kv_connector_extra_config, source="kv_connector_extra_config"
        )
        self._stats = SegReuseStats()
        self._computed = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to anybody: a preempted request's output need not be dropped."""
        return False

    # Scheduler process.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        # Imported here: it loads numba, which has no business in worker processes.
        from vllm_segreuse.scheduler import SchedulerSide

        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler = SchedulerSide(
            self._vllm_config, self._config, kv_cache_manager, self._stats
        )

    def set_enabled(self, enabled: bool) -> bool:
        """Kill switch at run time."""
        return self._scheduler.set_enabled(enabled)

    def status(self) -> dict[str, Any]:
        """What the status route shows."""
        return self._scheduler.status()

    def frozen(self) -> dict[str, Any]:
        """What knowledge bases need to know of the frozen pool."""
        return self._scheduler.frozen()

    def unfreeze(self, entries: list[str]) -> None:
        """Forget entries of the frozen pool."""
        self._scheduler.unfreeze(entries)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0])

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Tokens that are really not computed; vLLM's hit counters take this sum (see compat)."""
        saved = self._scheduler.saved_tokens(request)
        return {self._cache_hit_source: saved} if saved else {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SegReuseMetadata:
        return SegReuseMetadata(self._scheduler.take_plans(), self._scheduler.take_called_back())

    def call_back(self, request: Request) -> None:
        """The request's spread plan is not wanted any more (`compat/scheduler.py`)."""
        self._scheduler.call_back(request)

    def worker_told(
        self, metadata: SegReuseWorkerMetadata, requests: Mapping[str, Request]
    ) -> None:
        """Called before vLLM looks at the step's output (`compat/scheduler.py`)."""
        self._scheduler.computed(metadata.computed, requests)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        report = self._scheduler.finished(request, block_ids)
        return False, None if report is None else {"segreuse": report}

    def reset_cache(self) -> bool:
        """Done by the block pool's own reset, which runs before this."""
        return True

    # Both.

    def get_kv_connector_stats(self) -> SegReuseStats | None:
        return None if self._stats.is_empty() else self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SegReuseStats:
        return SegReuseStats() if data is None else SegReuseStats(data=data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> SegReusePromMetrics:
        return SegReusePromMetrics(*args, **kwargs)

    # Worker processes.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm_segreuse.compat.model_runner import loaded_model
        from vllm_segreuse.prefill.backlog import Backlog
        from vllm_segreuse.prefill.checks import prove

        if self._vllm_config.lora_config is not None:
            logger.warning("segment reuse: every request runs without reuse while LoRA is enabled")
            return
        runtime = prove(loaded_model(), self._vllm_config, self._kv_cache_config)
        config = self._vllm_config
        step_work = self._config.spread_work(
            config.scheduler_config.max_num_batched_tokens,
            config.model_config.get_num_layers(config.parallel_config),
        )
        self._backlog = Backlog(runtime.prefill, step_work or 0)
        logger.info(
            "segment reuse: proven on this model (largest deviation %.1e); %s",
            runtime.max_deviation,
            runtime.kernels,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SegReuseMetadata)
        if not metadata.plans:
            return
        assert self._backlog is not None
        with self._own_pass():
            report = self._backlog.take(metadata.plans)
        if report is not None:
            self._note(report)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Called behind every forward, and in steps without one: what is spread goes on here."""
        if self._backlog is None:
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SegReuseMetadata)
        self._backlog.drop(metadata.called_back)  # vLLM does not wait for these
        over = self._backlog.drop(finished_req_ids)
        with self._own_pass():
            done = self._backlog.advance()
        for report in done.values():
            self._note(report)
        return None, over | done.keys()

    @contextmanager
    def _own_pass(self) -> Iterator[None]:
        """The attention layers of our own pass must not call a connector's per-layer hooks."""
        metadata = self._get_connector_metadata()
        self.clear_connector_metadata()
        try:
            yield
        finally:
            self.bind_connector_metadata(metadata)

    def _note(self, report: PassReport) -> None:
        self._stats.observe("align", report.align_s)
        self._stats.observe("sparse_pass", report.sparse_s)
        self._computed |= report.computed
        if report.not_finite:
            self._stats.count_repeated(len(report.not_finite))
            logger.warning(
                "segment reuse met NaN or infinity; computed in full: %s", report.not_finite
            )

    def build_connector_worker_meta(self) -> SegReuseWorkerMetadata | None:
        if not self._computed:
            return None
        told, self._computed = SegReuseWorkerMetadata(self._computed), {}
        return told

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded before the forward starts."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved: reuse reads vLLM's own cache."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
