# SPDX-License-Identifier: Apache-2.0
"""Each call of vLLM's reaches the connector beside ours, and what either sends to its other half
arrives there."""

import copy
import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import CacheConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.outputs import KVConnectorOutput

from segreuse_extras.transfer.connector import (
    SegReuseTransferConnector,
    TransferHandshake,
    TransferMetadata,
    TransferWorkerMetadata,
)
from segreuse_extras.transfer.scheduler import EXACT_UNTIL, Transfers
from tests.e2e.folder_connector import (
    FolderConnector,
    FolderHandshake,
    FolderMetadata,
    FolderReport,
    FolderStats,
)
from tests.prefill.loaded import model_config
from tests.test_connector import assert_takes_what_vllm_passes
from tests.test_kv_group import FULL, kv_cache
from vllm_segreuse import kv_transfer_config
from vllm_segreuse.config.launch import check_config
from vllm_segreuse.connector import SegReuseWorkerMetadata
from vllm_segreuse.options.server import ConfigError
from vllm_segreuse.plan import ModelLayers

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
NAME = "tests.e2e.folder_connector:FolderConnector"

OURS = {
    *("bind_gpu_block_pool", "get_finished", "set_xfer_handshake_metadata", "role"),
    *("has_connector_metadata", "requires_piecewise_for_cudagraph"),
    "supports_divergent_local_hybrid_hits",
}
"""Of vLLM's interface, what is not passed on: the other connector's own `bind_kv_cache_manager`,
`get_transfer_results` and `..._pp_aware` call the first three; of the rest, what is our own, or
refused (`hosted.connector_class`), or of hybrid models only."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"))


def vllm_config(llama: Any, connector: str = "FolderConnector", **options: Any) -> Any:
    beside = {
        "kv_connector": connector,
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"folder": "nowhere"},
        "name_free": True,
    }
    return SimpleNamespace(
        model_config=llama,
        cache_config=CacheConfig(block_size=16),
        parallel_config=ParallelConfig(),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=100, policy="fcfs", disable_hybrid_kv_cache_manager=True
        ),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        speculative_config=None,
        lora_config=None,
        max_concurrent_batches=1,
        kv_transfer_config=check_config(kv_transfer_config(beside=beside, **options)),
    )


def connect(llama: Any, role: KVConnectorRole, **given: Any) -> SegReuseTransferConnector:
    return SegReuseTransferConnector(vllm_config(llama, **given), role, kv_cache(FULL))


def beside(connector: SegReuseTransferConnector) -> FolderConnector:
    found = connector.beside
    assert isinstance(found, FolderConnector)
    return found


class Counting(FolderConnector):
    """Wants other counts of reports than ours."""

    def get_finished_count(self) -> int | None:
        return 3


# No hook is lost.


def test_every_hook_of_vllms_is_passed_on() -> None:
    hooks = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    passed_on = {name for name in vars(SegReuseTransferConnector) if not name.startswith("_")}
    assert hooks - passed_on == OURS


def test_hooks_have_the_signatures_of_vllms() -> None:
    assert_takes_what_vllm_passes(SegReuseTransferConnector)


def test_each_process_has_both(llama: Any) -> None:
    for role in (SCHEDULER, WORKER):
        connector = connect(llama, role)
        assert beside(connector).role is role
        assert beside(connector)._vllm_config.kv_transfer_config.kv_connector == "FolderConnector"
        assert connector.requires_kv_delivery is beside(connector).requires_kv_delivery is True


def test_a_connector_that_counts_otherwise_is_refused(llama: Any) -> None:
    with pytest.raises(ConfigError, match="counts on 3 reports"):
        connect(llama, WORKER, connector="Counting")


# What halves send each other.


def side(transfers: Transfers, **calls: Any) -> Any:
    """Our half in the scheduler's process, as far as it is asked."""
    return SimpleNamespace(
        parts=SimpleNamespace(features=SimpleNamespace(named=lambda name: transfers)),
        leave=lambda request: None,
        **calls,
    )


def request(name: str = "r", **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=100,
        num_computed_tokens=100,
        num_preemptions=0,
        status=None,
    )


@pytest.fixture
def transfers() -> Transfers:
    found = Transfers(overlaps=False)
    inner: Any = SimpleNamespace(
        exact_ends=lambda request_id: (64, 64),
        **dict.fromkeys(
            ("restoration", "exact_stop", "left_behind", "written_until", "allocation_failed")
        ),
    )
    found.naming(inner)
    return found


def test_workers_tell_each_half_its_own(llama: Any) -> None:
    learned: list[Any] = []
    connector = connect(llama, SCHEDULER)
    connector.scheduler_side = SimpleNamespace(learn=lambda *told: learned.append(told))  # type: ignore[assignment]
    layers = ModelLayers.of_full_attention(2)
    told = TransferHandshake(layers, {"tier": 5}, FolderHandshake(2))
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): pickle.loads(pickle.dumps(told))})
    assert learned == [(layers, {"tier": 5})]
    assert beside(connector).handshakes == {0: FolderHandshake(2)}
    nothing = TransferHandshake(layers, {}, None)
    beside(connector).handshakes.clear()
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): nothing})
    assert beside(connector).handshakes == {}


def test_a_step_carries_the_metadata_of_both(llama: Any) -> None:
    connector = connect(llama, WORKER)
    ran: list[str] = []
    connector.worker_side = SimpleNamespace(begin_step=lambda messages: ran.append(messages))  # type: ignore[assignment]
    theirs = FolderMetadata(sends={"r": [1]})
    step = TransferMetadata([], ["called back"], {"tier": "order"}, theirs)
    step = pickle.loads(pickle.dumps(step))
    connector.handle_preemptions(step)
    assert ran == [{"tier": "order"}]
    connector.bind_connector_metadata(step)
    assert connector.has_connector_metadata()
    assert beside(connector)._get_connector_metadata() == theirs
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()
    assert not beside(connector).has_connector_metadata()


def test_our_pass_hides_the_step_from_attention_and_leaves_theirs(
    llama: Any, tmp_path: Path
) -> None:
    """The other connector may still be at work while our pass runs."""
    connector = connect(llama, WORKER)
    beside(connector).folder = tmp_path
    seen: list[bool] = []

    def run(plans: Any) -> None:
        seen.append(connector.has_connector_metadata())
        seen.append(beside(connector).has_connector_metadata())

    connector.worker_side = SimpleNamespace(before_forward=run)  # type: ignore[assignment]
    plan: Any = object()
    connector.bind_connector_metadata(TransferMetadata([plan], [], {}, FolderMetadata()))
    connector.start_load_kv(None)  # type: ignore[arg-type]
    assert seen == [False, True]
    assert connector.has_connector_metadata()


@pytest.mark.parametrize("which", ["both", "first", "second", "neither"])
def test_reports_of_ranks_are_joined_each_with_its_own(which: str) -> None:
    given = [
        FolderReport(["a"]) if which in ("both", "first") else None,
        FolderReport(["b"]) if which in ("both", "second") else None,
    ]
    first, second = (TransferWorkerMetadata({"r": "same"}, {}, it) for it in given)  # type: ignore[dict-item]
    joined = first.aggregate(second)
    assert isinstance(joined, TransferWorkerMetadata)
    assert isinstance(joined, SegReuseWorkerMetadata)
    assert joined.outcomes == {"r": "same"}
    expected = {"both": ["a", "b"], "first": ["a"], "second": ["b"], "neither": None}[which]
    assert (joined.beside.written if joined.beside else None) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("ours", [None, SegReuseWorkerMetadata({"r": 1})])  # type: ignore[dict-item]
@pytest.mark.parametrize("theirs", [None, ["a"]])
def test_workers_report_what_there_is(
    llama: Any, ours: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect(llama, WORKER)
    outcomes = {} if ours is None else ours.outcomes
    connector.worker_side = SimpleNamespace(take_outcomes=lambda: outcomes, end_step=dict)  # type: ignore[assignment]
    beside(connector).written = list(theirs or ())
    found = connector.build_connector_worker_meta()
    if ours is None and theirs is None:
        assert found is None
    else:
        assert found is not None
        assert found.outcomes == outcomes
        assert found.beside == (None if theirs is None else FolderReport(theirs))


def test_the_other_hears_of_its_own_loads_only(llama: Any, transfers: Transfers) -> None:
    connector = connect(llama, SCHEDULER)
    connector.scheduler_side = side(transfers)
    transfers.loads(request("theirs"))
    transfers.sends(request("sent"))
    report = TransferWorkerMetadata({}, {}, FolderReport(["sent"]))
    output = KVConnectorOutput(
        finished_recving={"theirs", "planned"},
        finished_sending={"sent"},
        kv_connector_worker_meta=report,
    )
    connector.update_connector_output(output)
    assert beside(connector).heard == {"loaded": {"theirs"}, "sent": {"sent"}}
    assert beside(connector).reports == [FolderReport(["sent"])]
    assert output.finished_recving == {"theirs", "planned"}, "vLLM still sees all"
    assert output.kv_connector_worker_meta is report
    assert not transfers.holds("theirs")
    assert not transfers.holds("sent")


def test_vllm_hears_of_the_loads_of_both(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = connect(llama, WORKER)
    connector.worker_side = SimpleNamespace(  # type: ignore[assignment]
        is_idle=False, after_forward=lambda called_back, finished: {"planned"}
    )
    connector.bind_connector_metadata(TransferMetadata([], [], {}, FolderMetadata()))
    results = KVConnectorTransferResults({"sent"}, {"theirs"}, {"failed"})
    monkeypatch.setattr(beside(connector), "get_transfer_results", lambda ids: results)
    found = connector.get_transfer_results(set())
    assert found.finished_recving == {"theirs", "planned"}
    assert (found.finished_sending, found.failed_recving) == ({"sent"}, {"failed"})
    assert results.finished_recving == {"theirs"}, "it may still be the other's own"


# Who supplies a request.


def test_a_request_that_is_handed_over_is_not_ours(llama: Any, transfers: Transfers) -> None:
    connector = connect(llama, SCHEDULER)
    happened: list[str] = []
    connector.scheduler_side = side(
        transfers,
        match=lambda request, hit: happened.append("matched") or (7, False),
        allocated=lambda request, blocks: happened.append("allocated"),
    )
    connector.scheduler_side.leave = lambda request: happened.append("left")  # type: ignore[method-assign, assignment, return-value, misc]
    blocks: Any = SimpleNamespace(
        get_block_ids=lambda: ([1, 2],), get_unhashed_block_ids=lambda: [1, 2]
    )
    received = request(do_remote_prefill=True, remote_request_id="x", **{EXACT_UNTIL: 32})
    assert connector.get_num_new_matched_tokens(received, 16) == (84, True)
    connector.update_state_after_alloc(received, blocks, 84)
    assert happened == ["left"]
    assert transfers.holds("r")
    assert beside(connector).next.loads["r"].block_ids == [1, 2]
    # Once more, when it runs.
    connector.update_state_after_alloc(received, blocks, 0)
    assert happened == ["left"]
    # Preempted since: it has been handed over, and computes its prompt.
    assert connector.get_num_new_matched_tokens(received, 0) == (7, False)
    connector.update_state_after_alloc(received, blocks, 7)
    assert happened == ["left", "matched", "allocated"]
    assert not transfers.is_received(received)


def test_what_is_there_before_its_step_is_over_is_not_awaited(
    llama: Any, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MoRIIO loads where it reads: vLLM is not told when it has. Held for ever, such requests
    would keep the cache from being reset."""
    connector = connect(llama, SCHEDULER)
    connector.scheduler_side = side(transfers)
    blocks: Any = SimpleNamespace(
        get_block_ids=lambda: ([1, 2],), get_unhashed_block_ids=lambda: [1, 2]
    )
    received = request(do_remote_prefill=True, remote_request_id="x", **{EXACT_UNTIL: 32})
    monkeypatch.setattr(
        beside(connector), "get_num_new_matched_tokens", lambda request, hit: (84, False)
    )
    assert connector.get_num_new_matched_tokens(received, 16) == (84, False)
    connector.update_state_after_alloc(received, blocks, 84)
    assert transfers.is_received(received)
    assert not transfers.holds("r")
    assert transfers.status() == {"transfers": {"loading": 0, "sending": 0}}


def test_one_that_is_not_known_yet_waits(
    llama: Any, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect(llama, SCHEDULER)
    connector.scheduler_side = side(transfers)
    monkeypatch.setattr(
        beside(connector), "get_num_new_matched_tokens", lambda request, hit: (None, True)
    )
    assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)


@pytest.mark.parametrize("report", [None, {"policy": "focus"}])
@pytest.mark.parametrize("theirs", [None, {"remote_request_id": "r"}])
@pytest.mark.parametrize("is_kept", [True, False])
def test_what_goes_with_the_answer(
    llama: Any,
    transfers: Transfers,
    monkeypatch: pytest.MonkeyPatch,
    report: Any,
    theirs: Any,
    is_kept: bool,
) -> None:
    connector = connect(llama, SCHEDULER)
    connector.scheduler_side = side(transfers, finished=lambda request, blocks: report)
    monkeypatch.setattr(
        beside(connector), "request_finished", lambda request, blocks: (is_kept, theirs)
    )
    delays, params = connector.request_finished(request(), [1])
    assert delays is transfers.holds("r") is is_kept
    expected = {} if theirs is None else theirs | {EXACT_UNTIL: 64}
    if report is not None:
        expected["segreuse"] = report
    assert (params or {}) == expected


# Statistics.


def kinds_in(registry: CollectorRegistry) -> Any:
    """Kinds of metrics, as vLLM hands them in, of a registry of their own."""

    def made(kind: Any, **named: Any) -> Any:
        named.pop("multiprocess_mode", None)
        return kind(**named, registry=registry)

    return {kind: functools.partial(made, kind) for kind in (Counter, Gauge, Histogram)}


def test_statistics_of_both_arrive_in_the_metrics(llama: Any) -> None:
    connector = connect(llama, WORKER)
    assert connector.get_kv_connector_stats() is None
    beside(connector).stats = FolderStats(data={"blocks": 3})
    connector._stats.inc("not_finite_total")
    found = connector.get_kv_connector_stats()
    assert found is not None
    sent = found.to_dict()
    assert sent.keys() == {"segreuse", NAME}
    first, second = (
        SegReuseTransferConnector.build_kv_connector_stats(copy.deepcopy(sent)) for _ in range(2)
    )
    both = first.aggregate(second)
    assert both.reduce()[NAME] == {"blocks": 6}  # type: ignore[comparison-overlap]
    registry = CollectorRegistry()
    metrics = SegReuseTransferConnector.build_prom_metrics(
        vllm_config(llama), kinds_in(registry), ["engine"], {0: ["0"]}
    )
    metrics.observe(sent)
    metrics.observe(sent)
    labels = {"engine": "0"}
    assert registry.get_sample_value("vllm:folder_blocks_total", labels) == 6
    assert registry.get_sample_value("vllm:segreuse_not_finite_total", labels) == 2


class Silent(FolderConnector):
    """Has statistics, and no metrics."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return None


def test_a_connector_without_metrics_shows_none(llama: Any) -> None:
    config = vllm_config(llama, connector="Silent")
    metrics = SegReuseTransferConnector.build_prom_metrics(
        config, kinds_in(CollectorRegistry()), ["engine"], {0: ["0"]}
    )
    metrics.observe({f"{__name__}:Silent": {"blocks": 1}})


def test_the_layout_is_the_one_that_the_other_needs(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FolderConnector, "get_required_kvcache_layout", classmethod(lambda cls, config: "LBHNC")
    )
    config = vllm_config(llama)
    assert SegReuseTransferConnector.get_required_kvcache_layout(config) == "LBHNC"


def test_sleep_is_passed_on_where_vllm_asks(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 does."""
    config, happened = vllm_config(llama), list[str]()
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.setattr(
            FolderConnector, name, lambda self, name=name: happened.append(name), raising=False
        )
    sleeps = classmethod(lambda cls, config: config.kv_connector == "FolderConnector")
    monkeypatch.setattr(FolderConnector, "supports_sleep_mode", sleeps, raising=False)
    connector = SegReuseTransferConnector(config, WORKER, kv_cache(FULL))
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert happened == ["unregister_kv_caches", "restore_kv_caches"]
    assert SegReuseTransferConnector.supports_sleep_mode(config.kv_transfer_config)
