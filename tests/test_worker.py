# SPDX-License-Identifier: Apache-2.0
"""The worker's half proves the model, carries plans out around vLLM's forward, and reports once."""

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import ParallelConfig

from segreuse_extras.images import worker as images_worker
from segreuse_extras.pipeline import stages
from segreuse_extras.pipeline.backlog import StageBacklog
from tests.prefill.loaded import model_config
from vllm_segreuse.config import SegReuseConfig, in_worker
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.tier import worker as tier_module
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import ModelLayers, TierOrders
from vllm_segreuse.prefill import worker as module
from vllm_segreuse.prefill.executor import PassReport
from vllm_segreuse.prefill.worker import WorkerSide

Patch = pytest.MonkeyPatch
LAYERS = ModelLayers.of_full_attention(3)


class Backlog:
    """Plans under way are names, done when a test says so."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.under_way: set[str] = set()
        self.done: dict[str, PassReport] = {}
        self.report: PassReport | None = None
        self.prefill: Any = None
        self.parts: Any = object()

    @property
    def is_empty(self) -> bool:
        return not (self.under_way or self.done)

    def stand_in(self, patch: Patch) -> None:
        """For what a worker proves, and has carried out."""

        def taking_over(prefill: Any, *_: Any) -> Backlog:
            self.prefill = prefill
            return self

        def proven(*_: Any) -> Any:
            return SimpleNamespace(prefill=self.prefill, parts=self.parts)

        patch.setattr(in_worker, "proven", proven)
        patch.setattr(images_worker, "loaded_model", lambda: None)
        patch.setattr(images_worker, "prove_images", lambda *given: 2 if given[2] else None)
        patch.setattr(in_worker, "backlog_of", taking_over)

    def take(self, plans: list[Any]) -> PassReport | None:
        self.log.append(("take", list(plans)))
        return self.report

    def advance(self) -> dict[str, PassReport]:
        self.log.append(("advance", None))
        done, self.done = self.done, {}
        return done

    def drop(self, request_ids: Any) -> set[str]:
        self.log.append(("drop", set(request_ids)))
        dropped = self.under_way & set(request_ids)
        self.under_way -= dropped
        return dropped


def report(**changes: Any) -> PassReport:
    return PassReport(
        **{"align_s": 0.25, "sparse_s": 0.5, "not_finite": [], "outcomes": {}} | changes
    )


@pytest.fixture
def backlog(monkeypatch: Patch) -> Backlog:
    made = Backlog()
    made.stand_in(monkeypatch)
    return made


@pytest.fixture
def stats() -> SegReuseStats:
    return SegReuseStats()


@pytest.fixture
def side(backlog: Backlog, stats: SegReuseStats) -> WorkerSide:
    return worker_side(stats)


def worker_side(stats: SegReuseStats, rank: int = 0, traces: str | None = None) -> WorkerSide:
    nothing: Any = SimpleNamespace(kv_cache_groups=[])
    return in_worker.worker_side(vllm_config_of(rank, traces), SegReuseConfig(), nothing, stats)


def vllm_config_of(rank: int = 0, traces: str | None = None) -> Any:
    return SimpleNamespace(
        model_config=None,
        parallel_config=SimpleNamespace(rank=rank, pipeline_parallel_size=1),
        observability_config=SimpleNamespace(otlp_traces_endpoint=traces),
    )


NO_LAYERS: Any = SimpleNamespace(known=[])
PLANS: Any = [SimpleNamespace(request_id="a", spread=False, trace_headers=None)]


def test_plans_are_carried_out_before_the_forward(
    side: WorkerSide, backlog: Backlog, stats: SegReuseStats
) -> None:
    backlog.report = report(outcomes={"a": 3})
    side.before_forward(PLANS)
    assert backlog.log == [("take", PLANS)]
    assert stats.data == {"align_seconds": [0.25], "sparse_pass_seconds": [0.5]}


def test_after_the_forward_who_ended_is_dropped_and_others_go_on(
    side: WorkerSide, backlog: Backlog
) -> None:
    backlog.under_way = {"called back", "ended", "goes on"}
    backlog.done = {"done": report(outcomes={"done": 9})}
    loaded = side.after_forward(["called back"], {"ended", "stranger"})
    assert backlog.log == [
        ("drop", {"called back"}),
        ("drop", {"ended", "stranger"}),
        ("advance", None),
    ]
    assert loaded == {"ended", "done"}, "vLLM waits for these, and not for who was called back"
    assert side.take_outcomes() == {"done": 9}


def test_numbers_of_computed_tokens_are_reported_once(side: WorkerSide, backlog: Backlog) -> None:
    assert side.take_outcomes() == {}
    backlog.report = report(outcomes={"a": 3})
    backlog.done = {"b": report(outcomes={"b": 5})}
    side.before_forward(PLANS)
    side.after_forward([], set())
    assert side.take_outcomes() == {"a": 3, "b": 5}
    assert side.take_outcomes() == {}


def test_what_was_not_finite_is_counted_and_logged(
    side: WorkerSide,
    backlog: Backlog,
    stats: SegReuseStats,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(module.logger, "propagate", True)
    backlog.report = report(not_finite=["a", "b"])
    with caplog.at_level(logging.WARNING, logger=module.logger.name):
        side.before_forward(PLANS)
    assert stats.data["not_finite_total"] == 1, "passes, not requests"
    assert "NaN or infinity; computed in full: ['a', 'b']" in caplog.text


def test_of_several_ranks_the_first_counts_what_was_not_finite(backlog: Backlog) -> None:
    """vLLM adds their statistics up."""
    backlog.report = report(not_finite=["a"])
    added = SegReuseStats()
    for rank in range(4):
        of_rank = SegReuseStats()
        worker_side(of_rank, rank).before_forward(PLANS)
        added.aggregate(of_rank)
    assert added.data["not_finite_total"] == 1


# The second tier.


class Region:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def cleanup(self) -> None:
        self._log.append("region given back")


ORDERS = TierOrders(1, np.array([4], np.int32), np.array([0], np.int32))


def with_tier(backlog: Any, patch: Patch, **options: Any) -> tuple[WorkerSide, list[Any]]:
    """A worker's half with a second tier, and what was stored, or how the region was made."""
    log: list[Any] = []
    mover = SimpleNamespace(
        store=lambda blocks, rows: log.append((blocks.tolist(), rows.tolist())),
        mark=lambda: None,
        close=lambda: log.append("rows let go"),
    )
    aligner = SimpleNamespace(
        copy_blocks="copy",
        stored_pages=lambda: "stored",
        device="cpu",
        reading=lambda rows: SimpleNamespace(host_rows=rows),
    )
    backlog.prefill = SimpleNamespace(
        aligner=aligner, with_aligner=lambda other: SimpleNamespace(aligner=other)
    )
    region = Region(log)
    patch.setattr(tier_module, "open_region", lambda *given: (log.append(given[2:]), region)[1])

    def mover_for(*given: Any, zeroises: bool) -> Any:
        log.append((*given, zeroises))
        return mover

    patch.setattr(tier_module, "mover_for", mover_for)
    patch.setattr(tier_module, "get_tp_group", lambda: SimpleNamespace(rank_in_group=3))
    config = SegReuseConfig(tier={"host_gib": 2.5, **options})
    assert config.tier is not None
    nothing: Any = SimpleNamespace(kv_cache_groups=[])
    side = in_worker.worker_side(vllm_config_of(), config, nothing, SegReuseStats())
    assert log == [(config.tier, 3), (region, "copy", "stored", "cpu", config.tier.zeroise)]
    assert backlog.prefill.aligner.host_rows is mover
    log.clear()
    return side, log


def test_what_a_step_evicts_is_stored_before_it_and_reported_once(
    backlog: Backlog, monkeypatch: Patch
) -> None:
    side, stored = with_tier(backlog, monkeypatch, zeroise=True)
    side.begin_step({})
    assert not side.end_step()
    side.begin_step({"tier": ORDERS})
    assert stored == [([4], [0])]
    assert side.end_step()["tier"].ranks == Counter({1: 1})
    assert not side.end_step()


def test_without_a_second_tier_nothing_is_stored(side: WorkerSide) -> None:
    side.begin_step({"tier": ORDERS})
    assert not side.end_step()
    side.close()


def test_the_region_is_given_back_at_the_end(backlog: Any, monkeypatch: Patch) -> None:
    side, log = with_tier(backlog, monkeypatch)
    assert [it.name for it in side.features] == ["audit", "images", "tier"]
    side.close()
    side.close()
    assert log == ["rows let go", "region given back"]


# Start.


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"))


def started(
    llama: Any, stats: SegReuseStats | None = None, **options: Any
) -> tuple[WorkerSide, Any, Any]:
    """A worker's half, and the configurations that it was given."""
    vllm_config: Any = SimpleNamespace(
        model_config=llama,
        parallel_config=ParallelConfig(),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
    )
    kv_cache_config: Any = SimpleNamespace(kv_cache_groups=[])
    config = SegReuseConfig(**options)
    counted = SegReuseStats() if stats is None else stats
    side = in_worker.worker_side(vllm_config, config, kv_cache_config, counted)
    return side, vllm_config, kv_cache_config


@pytest.mark.parametrize(("spread_tokens", "share"), [(7, 7 * 3), (None, 50 * 3), (0, 0)])
def test_the_model_is_proven(
    spread_tokens: int | None, share: int, llama: Any, monkeypatch: Patch
) -> None:
    model = object()
    proven = []
    drafter = object()
    monkeypatch.setattr(module, "loaded_model", lambda: model)
    monkeypatch.setattr(module, "loaded_drafter", lambda: drafter)
    prefill = SimpleNamespace(states=None, layers=LAYERS, runner=NO_LAYERS)
    runtime = SimpleNamespace(
        prefill=prefill,
        max_deviation=0.0,
        kernels="kernels",
        parts=None,
        graphs=None,
    )
    monkeypatch.setattr(module, "prove", lambda *given: (proven.append(given), runtime)[1])
    side, vllm_config, kv_cache_config = started(llama, spread_tokens=spread_tokens)
    assert proven == [(model, vllm_config, kv_cache_config, (), Codec.RAW, drafter, None)]
    assert side.backlog.prefill is prefill
    assert side.backlog.step_work == share


@pytest.mark.parametrize(("spread_tokens", "share"), [(7, 7 * 3), (None, 50 * 3), (0, 100 * 3)])
def test_a_stage_of_a_pipeline_divides_work_as_the_whole_model_does(
    spread_tokens: int | None, share: int, llama: Any, monkeypatch: Patch
) -> None:
    stage = Stage(1, 2, 2, 3, 3)
    prefill = SimpleNamespace(
        states=None, layers=LAYERS, runner=SimpleNamespace(stage=stage, known=[])
    )
    runtime = SimpleNamespace(prefill=prefill, parts=None)
    link: Any = object()
    monkeypatch.setattr(in_worker, "proven", lambda *_: runtime)
    monkeypatch.setattr(stages, "linked", lambda _: stages.LinkedStages(link))
    side, *_ = started(llama, spread_tokens=spread_tokens)
    assert isinstance(side.backlog, StageBacklog)
    assert (side.backlog.step_work, side.backlog.prefill) == (share, prefill)


def test_boundary_states_are_logged_and_counted(
    llama: Any, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    states = SimpleNamespace(cuts=(1, 2), num_bytes=3 << 29)
    prefill = SimpleNamespace(states=states, layers=LAYERS, runner=NO_LAYERS)
    runtime = SimpleNamespace(
        prefill=prefill,
        max_deviation=0.0,
        kernels="kernels",
        parts=None,
        graphs=None,
    )
    proven, stats = [], SegReuseStats()
    monkeypatch.setattr(module, "loaded_model", lambda: None)
    monkeypatch.setattr(module, "loaded_drafter", lambda: None)
    monkeypatch.setattr(module, "prove", lambda *given: (proven.append(given[3]), runtime)[1])
    monkeypatch.setattr(module.logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        started(llama, stats, similarity={"w_exact": {"2": 9, "1": 4}})
    assert proven == [(1, 2)]
    assert stats.data["state_bytes"] == [3 << 29]
    assert "boundary states at layers 1, 2 take 1.50 GiB beside the KV cache" in caplog.text


GRAPHS: Any = SimpleNamespace(sizes=(1, 2, 512))


class GraphProof:
    """Notes what is to be proven, and refuses it for a reason."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.seen: list[Any] = []

    def prove(self, captured: Any) -> None:
        self.seen.append(captured)
        if self.reason is not None:
            raise UnsupportedModelError(self.reason)


def awaiting_graphs(proof: GraphProof, llama: Any, patch: Patch) -> Callable[[], None]:
    """What a worker's half wants called once vLLM has captured its graphs."""
    awaited: list[Callable[[], None]] = []
    prefill = SimpleNamespace(states=None, layers=LAYERS, runner=NO_LAYERS)
    runtime = SimpleNamespace(
        prefill=prefill,
        max_deviation=0.0,
        kernels="kernels",
        parts=None,
        graphs=proof,
    )
    for name, replacement in {
        "loaded_model": lambda: None,
        "loaded_drafter": lambda: None,
        "prove": lambda *_: runtime,
        "once_captured": awaited.append,
        "captured_graphs": lambda: GRAPHS,
    }.items():
        patch.setattr(module, name, replacement)
    patch.setattr(module.logger, "propagate", True)
    started(llama)
    [then] = awaited
    assert proof.seen == []
    return then


def test_cuda_graphs_are_proven_once_they_are_captured(
    llama: Any, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    proof = GraphProof()
    then = awaiting_graphs(proof, llama, monkeypatch)
    with caplog.at_level(logging.INFO):
        then()
    assert proof.seen == [GRAPHS]
    assert "passes of up to 512 tokens run by vLLM's CUDA graphs" in caplog.text


def test_cuda_graphs_that_compute_something_else_are_refused(
    llama: Any, monkeypatch: Patch
) -> None:
    then = awaiting_graphs(GraphProof("they are off"), llama, monkeypatch)
    with pytest.raises(RefusedError, match=r"they are off; start without these graphs: -cc\."):
        then()


def test_where_nothing_is_captured_nothing_is_proven(llama: Any, monkeypatch: Patch) -> None:
    proof = GraphProof()
    then = awaiting_graphs(proof, llama, monkeypatch)
    monkeypatch.setattr(module, "captured_graphs", lambda: None)
    then()
    assert proof.seen == []
