# SPDX-License-Identifier: Apache-2.0
"""The connector hands what vLLM says to the scheduler's half or to the worker's, and back; both of
vLLM's model runners drive the worker's half through a step."""

import inspect
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from segreuse_extras.audit.messages import AuditDone, AuditOrders, AuditResult, Recording, Reference
from segreuse_extras.audit.worker import AuditRecording
from tests.prefill.loaded import model_config
from tests.test_kv_group import FULL, kv_cache
from tests.test_supported import Changed
from tests.test_worker import PLANS, Backlog, report
from vllm_segreuse import kv_transfer_config
from vllm_segreuse.compat.sampler import Sampled
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.connector import (
    SegReuseConnector,
    SegReuseHandshake,
    SegReuseMetadata,
    SegReuseWorkerMetadata,
)
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.plan import ModelLayers, TierDone, TierOrders
from vllm_segreuse.prefill.executor import PassReport

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"))


def vllm_config(llama: Any, **options: Any) -> Any:
    return SimpleNamespace(
        model_config=llama,
        cache_config=CacheConfig(block_size=16),
        parallel_config=ParallelConfig(),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=100, disable_hybrid_kv_cache_manager=True
        ),
        speculative_config=None,
        lora_config=None,
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        kv_transfer_config=kv_transfer_config(**options),
    )


def connect(llama: Any, role: KVConnectorRole, **options: Any) -> SegReuseConnector:
    return SegReuseConnector(vllm_config(llama, **options), role, kv_cache(FULL))


# What cannot be is refused, on either side.


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_what_is_not_supported_is_refused_before_anything_is_loaded(
    role: KVConnectorRole, llama: Any
) -> None:
    config = vllm_config(llama)
    config.parallel_config = Changed(ParallelConfig(), {"decode_context_parallel_size": 2})
    with pytest.raises(RefusedError, match="context parallelism is on"):
        SegReuseConnector(config, role, kv_cache(FULL))
    with pytest.raises(RefusedError, match="2 KV cache groups"):
        SegReuseConnector(vllm_config(llama), role, kv_cache(FULL, FULL))
    with pytest.raises(RefusedError, match="hashed in pieces of 8"):
        SegReuseConnector(vllm_config(llama), role, kv_cache(FULL, hash_block_size=8))


def test_another_vllm_is_refused(llama: Any, monkeypatch: Patch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(RuntimeError, match=r"found 0\.99\.0"):
        connect(llama, SCHEDULER)


def test_options_of_the_server_are_those_of_vllms_configuration(llama: Any) -> None:
    config = vllm_config(llama)
    config.kv_transfer_config.kv_connector_extra_config["polcy"] = "shift"
    with pytest.raises(ValueError, match="kv_connector_extra_config"):
        SegReuseConnector(config, WORKER, kv_cache(FULL))


# Every hook of vLLM's.


def assert_takes_what_vllm_passes(connector: type) -> None:
    """Whatever vLLM passes to its own base class can be passed to this one."""
    for name, ours in vars(connector).items():
        theirs = vars(KVConnectorBase_V1).get(name)
        if not inspect.isfunction(ours) or theirs is None:
            continue
        accepted = inspect.signature(ours).parameters.values()
        if any(each.kind is each.VAR_POSITIONAL for each in accepted):
            continue
        expected = list(inspect.signature(theirs).parameters)
        found = list(inspect.signature(ours).parameters)
        assert found[: len(expected)] == expected, f"{name}({', '.join(expected)})"


def test_hooks_have_the_signatures_of_vllms() -> None:
    assert_takes_what_vllm_passes(SegReuseConnector)


def test_what_vllm_must_not_wait_for(llama: Any) -> None:
    """Nothing is moved between machines: no saves, no blocks held back."""
    subject = connect(llama, WORKER)
    assert subject.requires_kv_delivery is False
    assert subject.get_finished_count() is None
    assert subject.reset_cache() is True
    assert subject.get_block_ids_with_load_errors() == set()
    assert not subject.has_pending_block_frees()
    for nothing in (subject.wait_for_save(), subject.wait_for_layer_load("layer")):
        assert nothing is None


# Scheduler process.


class Half:
    """`SchedulerSide`: what it was asked, and what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*given: Any) -> Any:
            self.asked.append((name, *given))
            return self.answers.get(name)

        return ask


@pytest.fixture
def half() -> Half:
    return Half()


@pytest.fixture
def subject(llama: Any, half: Half) -> SegReuseConnector:
    made = connect(llama, SCHEDULER)
    made.scheduler_side = half  # type: ignore[assignment]
    return made


REQUEST: Any = SimpleNamespace(request_id="request")
STORES = TierOrders(1, np.array([4], np.int32), np.array([0], np.int32))


@pytest.mark.parametrize(
    ("hook", "given", "asked"),
    [
        ("on_new_request", (REQUEST,), ("add", REQUEST)),
        ("get_num_new_matched_tokens", (REQUEST, 32), ("match", REQUEST, 32)),
        ("request_finished", (REQUEST, [1, 2]), ("finished", REQUEST, [1, 2])),
    ],
)
def test_hooks_ask_the_schedulers_half(
    hook: str, given: Any, asked: Any, subject: SegReuseConnector, half: Half
) -> None:
    half.answers = {"match": "the answer"}
    answer = getattr(subject, hook)(*given)
    assert half.asked == [asked]
    if asked[0] in half.answers:
        assert answer == "the answer"


def test_the_block_table_is_that_of_the_one_group(subject: SegReuseConnector, half: Half) -> None:
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([3, 1, 2],))
    subject.update_state_after_alloc(REQUEST, blocks, 40)
    assert half.asked == [("allocated", REQUEST, [3, 1, 2])]


def test_a_step_takes_its_plans_along(subject: SegReuseConnector, half: Half) -> None:
    messages = {"audit": AuditOrders(forget=["request"]), "tier": STORES}
    half.answers = {"take_step": (["plan"], ["gone"], messages)}
    metadata: Any = SegReuseMetadata(["plan"], ["gone"], messages)  # type: ignore[list-item]
    for tokens in (1, 0):
        scheduled: Any = SimpleNamespace(total_num_scheduled_tokens=tokens)
        assert subject.build_connector_meta(scheduled) == metadata
        assert half.asked[-1] == ("take_step", tokens > 0)


@pytest.mark.parametrize("saved", [0, 40])
def test_what_is_saved_is_what_counts_as_a_hit(
    saved: int, subject: SegReuseConnector, half: Half
) -> None:
    half.answers["saved_tokens"] = saved
    sources = subject.get_external_cache_hit_sources(REQUEST, 100)
    assert sum(sources.values()) == saved
    assert half.asked == [("saved_tokens", REQUEST)]
    assert sources == KVConnectorBase_V1.get_external_cache_hit_sources(subject, REQUEST, saved)


@pytest.mark.parametrize("report", [None, {"policy": "focus"}])
def test_a_report_is_under_a_key_of_its_own_and_no_block_is_held(
    report: Any, subject: SegReuseConnector, half: Half
) -> None:
    half.answers["finished"] = report
    held, parameters = subject.request_finished(REQUEST, [])
    assert held is False
    assert parameters == (None if report is None else {"segreuse": report})


def test_the_half_is_made_once_vllm_has_its_manager(llama: Any, monkeypatch: Patch) -> None:
    from vllm_segreuse.config import in_scheduler

    made = []
    monkeypatch.setattr(in_scheduler, "scheduler_side", lambda *given: made.append(given))
    config, caches = vllm_config(llama, policy="shift"), kv_cache(FULL)
    subject = SegReuseConnector(config, SCHEDULER, caches)
    manager: Any = SimpleNamespace(block_pool=object())
    subject.bind_kv_cache_manager(manager)
    options, stats = SegReuseConfig(policy="shift"), made[0][3]
    assert made == [(config, options, manager, stats, segment_group(caches), None)]
    assert_reports(subject, stats)


def assert_reports(subject: SegReuseConnector, stats: SegReuseStats) -> None:
    """What a half counts is what the connector reports."""
    stats.inc("tokens_total", 7, kind="reused")
    reported = subject.get_kv_connector_stats()
    assert reported is not None
    assert reported.data["tokens_total"] == {"reused": 7}


def test_with_a_second_tier_it_gets_the_region_that_the_workers_have_opened(
    llama: Any, monkeypatch: Patch
) -> None:
    from vllm_segreuse.config import in_scheduler
    from vllm_segreuse.features.tier import region

    opened, made, bound = [], [], []

    def open_region(*given: Any, rank: int | None) -> str:
        opened.append((*given, rank))
        return "region"

    monkeypatch.setattr(region, "open_region", open_region)
    monkeypatch.setattr(in_scheduler, "scheduler_side", lambda *given: made.append(given))
    monkeypatch.setattr(
        KVConnectorBase_V1, "bind_kv_cache_manager", lambda self, manager: bound.append(manager)
    )
    config, caches = vllm_config(llama, tier={"host_gib": 2.5}), kv_cache(FULL)
    subject = SegReuseConnector(config, SCHEDULER, caches)
    manager: Any = SimpleNamespace(block_pool=object())
    subject.bind_kv_cache_manager(manager)
    assert made[0][-1] == "region"
    options = SegReuseConfig.from_options({"tier": {"host_gib": 2.5}}).tier
    assert opened == [(config, caches, options, None)]
    assert bound == [manager], "vLLM's own part of it has it, too"


def test_workers_report_what_the_layers_are(
    subject: SegReuseConnector, half: Half, worker: SegReuseConnector, backlog: Any
) -> None:
    """By vLLM's handshake, which it makes before the first request."""
    backlog.prefill = SimpleNamespace(own_layers=ModelLayers(6, (1, 3)))
    shaken = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
    subject.set_xfer_handshake_metadata_pp_aware({(0, 0): shaken, (0, 1): shaken})
    taken = [("learn", ModelLayers(6, (1, 3)), {"images": 2})]
    assert half.asked == taken * 2


def test_layers_of_pipeline_stages_are_joined_in_order(
    subject: SegReuseConnector, half: Half
) -> None:
    shaken = {
        (stage, rank): SegReuseHandshake(ModelLayers(count, scored))
        for stage, count, scored in ((1, 2, (0,)), (0, 3, (1, 2)))
        for rank in (1, 0)
    }
    subject.set_xfer_handshake_metadata_pp_aware(dict(shaken))
    assert half.asked == [("learn", ModelLayers(5, (1, 2, 3)), {})] * 4


# Statistics.


def test_statistics_are_reported_once(llama: Any, monkeypatch: Patch) -> None:
    from vllm_segreuse.config import in_worker

    made: list[SegReuseStats] = []
    monkeypatch.setattr(in_worker, "worker_side", lambda *given: made.append(given[-1]))
    subject = connect(llama, WORKER)
    subject.register_kv_caches({})
    assert subject.get_kv_connector_stats() is None
    made[0].inc("tokens_total", 7, kind="reused")
    reported = subject.get_kv_connector_stats()
    assert reported is not None
    assert reported.data["tokens_total"] == {"reused": 7}
    assert subject.get_kv_connector_stats() is None
    again = SegReuseConnector.build_kv_connector_stats(reported.data)
    assert again == reported
    assert SegReuseConnector.build_kv_connector_stats().is_empty()


# Worker processes.


class Hidden(Backlog):
    """Looks whether attention layers of the pass would find the connector's metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.subject: SegReuseConnector
        self.fails = False

    def take(self, plans: list[Any]) -> PassReport | None:
        self._look()
        return super().take(plans)

    def advance(self) -> dict[str, PassReport]:
        self._look()
        return super().advance()

    def _look(self) -> None:
        assert not self.subject.has_connector_metadata(), "layers of the pass would call us"
        if self.fails:
            raise ArithmeticError


@pytest.fixture
def backlog(monkeypatch: Patch) -> Hidden:
    made = Hidden()
    made.stand_in(monkeypatch)
    return made


@pytest.fixture
def worker(llama: Any, backlog: Hidden) -> SegReuseConnector:
    made = backlog.subject = connect(llama, WORKER)
    made.register_kv_caches({})
    return made


CONTEXT: Any = object()


def step(worker: SegReuseConnector, ended: set[str] | None = None, **metadata: Any) -> Any:
    """What a runner does in a step; returns who is done."""
    sent = SegReuseMetadata(**metadata)
    worker.handle_preemptions(sent)
    worker.bind_connector_metadata(sent)
    worker.start_load_kv(CONTEXT, scheduler_output=None, request_ids=[])
    done = worker.get_finished(ended or set())
    worker.clear_connector_metadata()
    return done


def test_the_half_is_made_once_vllm_has_its_caches(llama: Any, monkeypatch: Patch) -> None:
    from vllm_segreuse.config import in_worker

    made = []
    monkeypatch.setattr(in_worker, "worker_side", lambda *given: made.append(given))
    config, caches = vllm_config(llama, policy="shift"), kv_cache(FULL)
    subject = SegReuseConnector(config, WORKER, caches)
    subject.register_kv_caches({})
    assert made == [(config, SegReuseConfig(policy="shift"), caches, made[0][3])]
    assert_reports(subject, made[0][3])


def test_a_steps_metadata_reach_the_workers_half(
    worker: SegReuseConnector, backlog: Hidden
) -> None:
    backlog.under_way = {"ended"}
    backlog.report = report(outcomes={"a": 3})
    backlog.done = {"b": report(outcomes={"b": 5})}
    assert worker.build_connector_worker_meta() is None
    sent, loaded = step(worker, {"ended"}, plans=PLANS, called_back=["called back"])
    assert backlog.log == [
        ("take", PLANS),
        ("drop", {"called back"}),
        ("drop", {"ended"}),
        ("advance", None),
    ]
    assert sent is None
    assert loaded == {"ended", "b"}
    reported = worker.build_connector_worker_meta()
    assert reported == SegReuseWorkerMetadata({"a": 3, "b": 5})
    assert worker.build_connector_worker_meta() is None
    assert reported.aggregate(SegReuseWorkerMetadata({"a": 3, "b": 5})) == reported, "ranks agree"
    assert SegReuseWorkerMetadata().aggregate(reported) == reported, "a rank has nothing to report"
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["align_seconds"] == [0.25, 0.25]
    assert stats.data["sparse_pass_seconds"] == [0.5, 0.5]


def test_step_without_reuse_does_next_to_nothing(
    worker: SegReuseConnector, backlog: Hidden
) -> None:
    """Most steps are; many requests may decode in them."""
    assert step(worker, {"ended"}) == (None, None)
    assert backlog.log == []
    assert worker.get_kv_connector_stats() is None
    backlog.under_way = {"spread"}
    assert step(worker) == (None, set())
    assert [name for name, _ in backlog.log] == ["drop", "drop", "advance"]


def test_audits_are_recorded_from_the_begin_of_the_step(worker: SegReuseConnector) -> None:
    """With vLLM's second runner loads may start after the step has sampled."""
    sent = SegReuseMetadata(messages={"audit": AuditOrders({"audited": Recording(2, 1)})})
    worker.handle_preemptions(sent)
    worker.bind_connector_metadata(sent)
    (audit,) = (it for it in worker.worker_side.features if isinstance(it, AuditRecording))
    recorder = audit.recorder
    recorder.see([Sampled("audited", 0, 2)], torch.zeros(1, 4))
    worker.start_load_kv(CONTEXT)
    worker.get_finished(set())
    worker.clear_connector_metadata()
    compare = AuditOrders(compare={"reference": Reference("audited", 2, (1,))})
    step(worker, messages={"audit": compare})
    assert worker.build_connector_worker_meta() is None
    recorder.see([Sampled("reference", 0, 2)], torch.zeros(1, 4))
    reported = worker.build_connector_worker_meta()
    done = AuditDone({"reference": AuditResult(0.0, 1, 1)})
    assert reported == SegReuseWorkerMetadata({}, {"audit": done})
    assert reported.aggregate(reported) == reported, "ranks agree"
    assert worker.build_connector_worker_meta() is None


def test_orders_of_the_second_tier_are_carried_out_first_and_reports_of_ranks_summed(
    worker: SegReuseConnector, backlog: Hidden, monkeypatch: Patch
) -> None:
    side = worker.worker_side
    monkeypatch.setattr(
        side, "begin_step", lambda sent: backlog.log.append(("store", sent.get("tier")))
    )
    done = TierDone(Counter({1: 1}))
    monkeypatch.setattr(side, "end_step", lambda: {"tier": done})
    worker.handle_preemptions(SegReuseMetadata(messages={"tier": STORES}))
    worker.handle_preemptions(SegReuseMetadata())
    assert backlog.log == [("store", STORES), ("store", None)]
    reported = worker.build_connector_worker_meta()
    assert reported == SegReuseWorkerMetadata(messages={"tier": done})
    other = SegReuseWorkerMetadata(messages={"tier": TierDone(Counter({1: 1, 2: 1}), {2})})
    summed = TierDone(Counter({1: 2, 2: 1}), {2})
    assert reported.aggregate(other) == SegReuseWorkerMetadata(messages={"tier": summed})


def test_the_end_of_the_engine_reaches_both_halves(
    llama: Any,
    worker: SegReuseConnector,
    subject: SegReuseConnector,
    half: Half,
    monkeypatch: Patch,
) -> None:
    closed = []
    monkeypatch.setattr(worker.worker_side, "close", lambda: closed.append(True))
    worker.shutdown()
    subject.shutdown()
    connect(llama, SCHEDULER).shutdown()  # ended before it was started
    assert closed == [True]
    assert half.asked == [("close",)]


@pytest.mark.parametrize("when", ["start_load_kv", "get_finished"])
@pytest.mark.parametrize("fails", [False, True])
def test_vllms_metadata_is_left_as_it_was(
    fails: bool, when: str, worker: SegReuseConnector, backlog: Hidden
) -> None:
    """vLLM ends the step with the connector as it was bound."""
    backlog.under_way = {"spread"}
    metadata = SegReuseMetadata(plans=PLANS)
    worker.bind_connector_metadata(metadata)
    backlog.fails = fails
    given: Any = CONTEXT if when == "start_load_kv" else set()
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        getattr(worker, when)(given)
    assert worker._get_connector_metadata() is metadata


# Through vLLM's own runners.


def _by_first_runner(worker: SegReuseConnector, output: Any, patch: Patch) -> Any:
    from vllm.v1.worker import kv_connector_model_runner_mixin as runner

    patch.setattr(runner, "get_kv_transfer_group", lambda: worker)
    patch.setattr(runner, "has_kv_transfer_group", lambda: True)
    patch.setattr(runner, "get_forward_context", lambda: CONTEXT)
    with runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as told:
        worker.worker_side.backlog.log.append(("forward", None))  # type: ignore[union-attr]
    return told


def _by_second_runner(worker: SegReuseConnector, output: Any, patch: Patch) -> Any:
    from vllm.v1.worker.gpu import kv_connector as runner

    patch.setattr(runner, "get_kv_transfer_group", lambda: worker)
    patch.setattr(runner, "get_forward_context", lambda: CONTEXT)
    patch.setattr(runner, "is_forward_context_available", lambda: True)
    patch.setattr(worker, "register_kv_caches", lambda kv_caches: None)
    batch: Any = SimpleNamespace(idx_mapping=[], req_ids=[], num_tokens=0)
    driver = runner.ActiveKVConnector(SimpleNamespace(), {})  # type: ignore[arg-type]
    driver.pre_forward(output, batch, {})
    worker.worker_side.backlog.log.append(("forward", None))  # type: ignore[union-attr]
    driver.finish_forward()
    return driver.post_forward(output.finished_req_ids)


@pytest.mark.parametrize("drive", [_by_first_runner, _by_second_runner])
@pytest.mark.parametrize("at_once", [True, False])
def test_both_runners_carry_a_step_through(
    at_once: bool,
    drive: Callable[..., Any],
    worker: SegReuseConnector,
    backlog: Hidden,
    monkeypatch: Patch,
) -> None:
    """What is needed at once is there before the forward; what is spread goes on behind it."""
    backlog.done = {"spread": report(outcomes={"spread": 4})}
    backlog.report = report(outcomes={"now": 2})
    output: Any = SimpleNamespace(
        kv_connector_metadata=SegReuseMetadata(plans=PLANS, messages={"tier": STORES}),
        has_sync_kv_loads=at_once,
        finished_req_ids={"ended"},
    )
    told = drive(worker, output, monkeypatch)
    names = [name for name, _ in backlog.log]
    first = ["take", "forward"] if at_once else ["forward", "take"]
    assert names == [*first, "drop", "drop", "advance"]
    assert told.finished_recving == {"spread"}
    assert not told.finished_sending
    assert told.kv_connector_worker_meta == SegReuseWorkerMetadata({"now": 2, "spread": 4})
    assert told.kv_connector_stats.data["sparse_pass_seconds"] == [0.5, 0.5]
    assert not worker.has_connector_metadata()
