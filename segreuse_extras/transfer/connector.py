# SPDX-License-Identifier: Apache-2.0
"""`SegReuseTransferConnector`: segment reuse that hosts a transfer connector of vLLM's.

vLLM has one connector. This one is ours, and passes each call on to the other: on a prefill engine
ours supplies what it finds, and the other hands the result over once the request has ended; on a
decode engine the other supplies the request, and ours sees to the names of its blocks
(`scheduler.py`). What either sends to its other half travels beside ours.

vLLM's own `MultiConnector` does not do: it gives the handshake of one connector to all of them, and
does not keep the attention layers of our pass from calling the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
)

from segreuse_extras.transfer.hosted import (
    connector_class,
    engine_config,
    made,
    transfer_config,
)
from segreuse_extras.transfer.options import BesideOptions, TransferServer
from segreuse_extras.transfer.scheduler import EXACT_UNTIL, Transfers
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.connector import (
    SegReuseConnector,
    SegReuseHandshake,
    SegReuseMetadata,
    SegReuseWorkerMetadata,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_OURS = "segreuse"
"""Key of our statistics; those of the other connector have the name of its class."""


@dataclass
class TransferMetadata(SegReuseMetadata):
    """Of a step, with the other connector's."""

    beside: KVConnectorMetadata | None = None


@dataclass
class TransferWorkerMetadata(SegReuseWorkerMetadata):
    """What workers report, with what the other connector's report."""

    beside: KVConnectorWorkerMetadata | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Each connector's own."""
        assert isinstance(other, TransferWorkerMetadata)
        ours = super().aggregate(other)
        assert isinstance(ours, SegReuseWorkerMetadata)
        theirs = self.beside or other.beside
        if self.beside is not None and other.beside is not None:
            theirs = self.beside.aggregate(other.beside)
        return TransferWorkerMetadata(ours.outcomes, ours.messages, theirs)


@dataclass
class TransferHandshake(SegReuseHandshake):
    """What workers tell the scheduler's process, with what the other connector's tell it."""

    beside: KVConnectorHandshakeMetadata | None = None


class _NotShown(KVConnectorPromMetrics):
    """Of a connector without metrics."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Nothing is shown."""


class SegReuseTransferConnector(SegReuseConnector):
    """Ours, with another beside it; vLLM documents the interface (`kv_connector/v1/base.py`).

    Attributes:
        beside: the other connector.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.beside = made(_options(vllm_config), vllm_config, role, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether the other connector hands over KV that must arrive."""
        return bool(self.beside.requires_kv_delivery)

    @property
    def _transfers(self) -> Transfers:
        found = self.scheduler_side.parts.features.named(Transfers.name)
        assert isinstance(found, Transfers)
        return found

    # Scheduler process.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.beside.bind_kv_cache_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """To each half what its own workers tell; the other connector may have nothing to tell."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        theirs = {
            ranks: told.beside
            for ranks, told in metadata.items()
            if isinstance(told, TransferHandshake) and told.beside is not None
        }
        if theirs:
            self.beside.set_xfer_handshake_metadata_pp_aware(theirs)

    def on_new_request(self, request: Request) -> None:
        """The other connector comes first: it may shorten the prompt."""
        self.beside.on_new_request(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What comes from another engine goes before what ours finds."""
        found, is_async = self.beside.get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None:
            return None, False
        if found:
            self._transfers.receives(request, num_computed_tokens + found, is_async)
            self.scheduler_side.leave(request)
            return found, is_async
        self._transfers.computes(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not self._transfers.is_received(request):
            # A connector that loads nothing still hears of the blocks, as in `MultiConnector`.
            self.beside.update_state_after_alloc(request, blocks, 0)
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        if num_external_tokens and self._transfers.is_set_aside(request):
            self._transfers.loads(request)
        self.beside.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        if self._transfers.is_received(request):
            return self.beside.get_loaded_kv_cache_group_ids(request)
        return super().get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self._transfers.is_received(request):
            return self.beside.get_external_cache_hit_sources(request, num_external_tokens)
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TransferMetadata:
        ours = super().build_connector_meta(scheduler_output)
        theirs = self.beside.build_connector_meta(scheduler_output)
        return TransferMetadata(ours.plans, ours.called_back, ours.messages, theirs)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The other connector hears of its own loads and of its own workers only."""
        loaded = self._transfers.loading(connector_output.finished_recving or ())
        reported = connector_output.kv_connector_worker_meta
        theirs = reported.beside if isinstance(reported, TransferWorkerMetadata) else None
        self.beside.update_connector_output(
            replace(connector_output, finished_recving=loaded, kv_connector_worker_meta=theirs)
        )
        self._transfers.ended(loaded, connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        return super().has_pending_push_work() or self.beside.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return bool(self.beside.has_pending_block_frees())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Where the other connector hands the request over, it is told how far KV is exact."""
        until = self._transfers.exact_until(request)
        if isinstance(self.beside, SupportsHMA):
            is_kept, theirs = self.beside.request_finished_all_groups(request, (block_ids,))
        else:
            is_kept, theirs = self.beside.request_finished(request, block_ids)
        if is_kept:
            self._transfers.sends(request)
        _, ours = super().request_finished(request, block_ids)
        if theirs is None:
            return is_kept, ours
        return is_kept, {**theirs, EXACT_UNTIL: until, **(ours or {})}

    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> bool:
        return bool(self.beside.register_finished_partial_tail(*args, **kwargs))

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.beside.take_events()

    def reset_cache(self) -> bool:
        return super().reset_cache() and self.beside.reset_cache() is not False

    # Worker processes.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self.beside.get_mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.beside.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Of vLLM 0.33: the engine goes to sleep."""
        getattr(self.beside, "unregister_kv_caches")()  # noqa: B009 - not in 0.32

    def restore_kv_caches(self) -> None:
        """Of vLLM 0.33: it wakes up."""
        getattr(self.beside, "restore_kv_caches")()  # noqa: B009 - not in 0.32

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self.beside.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> TransferHandshake:
        ours = super().get_handshake_metadata()
        return TransferHandshake(ours.layers, ours.facts, self.beside.get_handshake_metadata())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, TransferMetadata)
        super().bind_connector_metadata(connector_metadata)
        self.beside.bind_connector_metadata(_theirs(connector_metadata))

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.beside.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, TransferMetadata)
        self.beside.handle_preemptions(_theirs(kv_connector_metadata))
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.beside.start_load_kv(forward_context, **kwargs)
        super().start_load_kv(forward_context, **kwargs)

    def finish_forward(self) -> None:
        self.beside.finish_forward()

    def reset_capture_state(self) -> None:
        self.beside.reset_capture_state()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.beside.wait_for_layer_load(layer_name)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Of the model's own forward; our pass hides the step from it (`_own_pass`)."""
        self.beside.save_kv_layer(*args, **kwargs)

    def wait_for_save(self) -> None:
        self.beside.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        theirs = self.beside.get_transfer_results(finished_req_ids)
        _, planned = self.get_finished(finished_req_ids)
        loaded = theirs.finished_recving | (planned or set())
        return replace(theirs, finished_recving=loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.beside.get_block_ids_with_load_errors()

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        return self.beside.get_kv_connector_kv_cache_events()

    def build_connector_worker_meta(self) -> TransferWorkerMetadata | None:
        ours = super().build_connector_worker_meta()
        theirs = self.beside.build_connector_worker_meta()
        if ours is None and theirs is None:
            return None
        ours = ours or SegReuseWorkerMetadata()
        return TransferWorkerMetadata(ours.outcomes, ours.messages, theirs)

    # Both.

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            self.beside.shutdown()

    def get_finished_count(self) -> int | None:
        """One report of each worker, as plans are reported (`hosted.made`)."""
        return None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        found = {
            _OURS: super().get_kv_connector_stats(),
            _full_name(type(self.beside)): self.beside.get_kv_connector_stats(),
        }
        stats = {name: it for name, it in found.items() if it is not None}
        return MultiKVConnectorStats(data=stats) if stats else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Statistics that have come from another process as plain values."""
        made: dict[str, KVConnectorStats] = {}
        for name, counted in (data or {}).items():
            of = SegReuseConnector if name == _OURS else _class_of(name)
            stats = of.build_kv_connector_stats(data=counted)
            if stats is not None:
                made[name] = stats
        return MultiKVConnectorStats(data=made)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any) -> KVConnectorPromMetrics:
        seen = engine_config(_options(vllm_config), vllm_config)
        assert seen.kv_transfer_config is not None
        beside = connector_class(seen.kv_transfer_config)
        metrics: dict[str, KVConnectorPromMetrics] = {
            _OURS: SegReuseConnector.build_prom_metrics(vllm_config, *args),
            _full_name(beside): beside.build_prom_metrics(seen, *args)
            or _NotShown(vllm_config, *args),
        }
        return MultiKVConnectorPromMetrics(vllm_config, *args, prom_metrics=metrics)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Of vLLM 0.33: whether the other connector follows KV caches through sleep."""
        inner = transfer_config(_beside_of(kv_transfer_config), kv_transfer_config)
        return bool(getattr(connector_class(inner), "supports_sleep_mode")(inner))  # noqa: B009

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        seen = engine_config(_options(vllm_config), vllm_config)
        assert seen.kv_transfer_config is not None
        return connector_class(seen.kv_transfer_config).get_required_kvcache_layout(seen)


def _options(vllm_config: VllmConfig) -> BesideOptions:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return _beside_of(transfer)


def _beside_of(transfer: KVTransferConfig) -> BesideOptions:
    options = SegReuseConfig.from_options(transfer.kv_connector_extra_config)
    beside = TransferServer.of(options).beside
    assert beside is not None
    return beside


def _theirs(metadata: TransferMetadata) -> KVConnectorMetadata:
    assert metadata.beside is not None
    return metadata.beside


def _full_name(connector: type) -> str:
    return f"{connector.__module__}:{connector.__qualname__}"


def _class_of(name: str) -> Any:
    module, _, qualified = name.partition(":")
    return getattr(import_module(module), qualified)
