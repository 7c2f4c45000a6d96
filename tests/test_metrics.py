# SPDX-License-Identifier: Apache-2.0
"""What the connector counts is what `/metrics` shows, after a trip between processes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_segreuse.metrics import SegReusePromMetrics, SegReuseStats


def filled() -> SegReuseStats:
    stats = SegReuseStats()
    stats.count_tokens("prefix", 32)
    stats.count_tokens("reused", 900)
    stats.count_tokens("reused", 100)
    stats.count_tokens("recomputed", 100)
    stats.count_tokens("exact", 64)
    stats.count_tokens("new", 7)
    stats.count_observed("reused", 300)
    stats.count_observed("recomputed", 50)
    stats.count_request("reused")
    stats.count_request("bypassed", "too_few_reused_tokens")
    stats.count_request("bypassed", "too_few_reused_tokens")
    stats.observe("match", 0.001)
    stats.observe("match", 0.003)
    stats.note_frozen(0.5)
    stats.note_frozen(0.25)
    stats.note_states(4096)
    for _ in range(3):
        stats.count_repeated()
    stats.observe_drift(2.5, in_full=False)
    stats.observe_drift(7.0, in_full=True)
    stats.observe_acceptance((0.25, 0.75, float("nan"), float("inf")), rejected=3)
    stats.count_audit("shift", "docs", "compared")
    stats.count_audit("shift", "docs", "busy")
    stats.observe_compared("shift", "docs", 0.25, 5, 8)
    stats.count_drifted("docs", "drifted")
    stats.count_audit_log_error()
    return stats


def over_the_wire(stats: SegReuseStats) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> SegReusePromMetrics:
    def bound(kind: type) -> Any:
        return lambda **kwargs: kind(**kwargs, registry=registry)

    return SegReusePromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        {kind: bound(kind) for kind in (Gauge, Counter, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )


def test_survives_the_trip_between_processes() -> None:
    stats = filled()
    assert SegReuseStats(data=over_the_wire(stats)) == stats


def test_empty_until_something_is_counted() -> None:
    stats = SegReuseStats()
    assert stats.is_empty()
    stats.count_tokens("new", 0)
    assert stats.is_empty()
    stats.count_request("bypassed", "disabled")
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


@pytest.mark.parametrize(
    "count",
    [
        lambda stats: stats.count_tokens("exact", 1),
        lambda stats: stats.count_tokens("similar", 1),
        lambda stats: stats.count_request("reused"),
        lambda stats: stats.observe("align", 0.5),
        lambda stats: stats.note_frozen(0.0),
        lambda stats: stats.note_states(0),
        lambda stats: stats.count_repeated(),
        lambda stats: stats.observe_drift(0.0, in_full=False),
        lambda stats: stats.observe_acceptance((0.0,), rejected=0),
        lambda stats: stats.observe_acceptance((float("nan"),), rejected=1),
        lambda stats: stats.count_audit("shift", "docs", "busy"),
        lambda stats: stats.observe_compared("shift", "docs", 0.0, 0, 0),
        lambda stats: stats.count_drifted("docs", "recovered"),
        lambda stats: stats.count_audit_log_error(),
        lambda stats: stats.note_tier("host", 0, 0),
        lambda stats: stats.count_tier_tokens("stored", 1),
        lambda stats: stats.count_tier_dropped("full", 1),
        lambda stats: stats.count_tier_files("found", 1),
    ],
)
def test_whatever_is_counted_is_something_to_send(count: Any) -> None:
    stats = SegReuseStats()
    count(stats)
    assert not stats.is_empty()
    twice = SegReuseStats().aggregate(stats).aggregate(stats)
    count(stats)
    assert twice == stats


def test_take_hands_over_and_starts_anew() -> None:
    stats = filled()
    taken = stats.take()
    assert taken == filled()
    assert stats.is_empty()
    stats.count_tokens("new", 1)
    assert taken == filled()


def test_aggregate_adds() -> None:
    total = filled().aggregate(SegReuseStats(data=over_the_wire(filled())))
    assert total.data == {
        "tokens": {"prefix": 64, "reused": 2000, "recomputed": 200, "exact": 128, "new": 14},
        "observed": {"reused": 600, "recomputed": 100},
        "requests": {"reused": {"": 2}, "bypassed": {"too_few_reused_tokens": 4}},
        "seconds": {"match": [0.001, 0.003, 0.001, 0.003]},
        "frozen": [0.5, 0.25, 0.5, 0.25],
        "states": [4096] * 2,
        "repeated": 6,
        "drift": [2.5, 7.0, 2.5, 7.0],
        "in_full": 2,
        "boundary_drift": [0.25, 0.75, 0.25, 0.75],
        "accepted": 2,
        "rejected": 6,
        "audits": [["shift", "docs", "compared"], ["shift", "docs", "busy"]] * 2,
        "compared": [["shift", "docs", 0.25, 5, 8]] * 2,
        "drifted": [["docs", "drifted"]] * 2,
        "audit_log_errors": 2,
        "tier": [],
        "tier_tokens": {},
        "tier_dropped": {},
        "tier_files": {},
    }


def test_reduce_is_flat_and_speaks_milliseconds() -> None:
    assert filled().reduce() == {
        "segreuse reused requests": 1,
        "segreuse bypassed requests": 2,
        "segreuse prefix tokens": 32,
        "segreuse reused tokens": 1000,
        "segreuse recomputed tokens": 100,
        "segreuse exact tokens": 64,
        "segreuse new tokens": 7,
        "segreuse avg match (ms)": 2.0,
    }
    assert SegReuseStats().reduce() == {}


def test_unknown_names_are_refused_where_they_are_counted() -> None:
    with pytest.raises(ValueError, match="'shifted'"):
        SegReuseStats().count_tokens("shifted", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'hash'"):
        SegReuseStats().observe("hash", 1.0)  # type: ignore[arg-type]


def test_prometheus_shows_what_was_counted(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    metrics.observe(over_the_wire(filled()), engine_idx=1)
    metrics.observe(over_the_wire(filled()), engine_idx=1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"vllm:segreuse_{name}", {"model_name": "m", "engine": "1", **labels}
        )

    assert value("frozen_share") == 0.25, "the last of them"
    assert value("state_bytes") == 4096
    assert value("not_finite_total") == 6
    assert value("drift_count") == 4
    assert value("drift_sum") == 19
    assert value("in_full_total") == 2
    assert value("boundary_drift_count") == 4, "what is not a number is not counted"
    assert value("boundary_drift_sum") == 2
    assert value("similar_segments_total", outcome="accepted") == 2
    assert value("similar_segments_total", outcome="rejected") == 6
    assert value("tokens_total", kind="reused") == 2000
    assert value("tokens_total", kind="prefix") == 64
    assert value("observed_tokens_total", kind="reused") == 600
    assert value("observed_tokens_total", kind="recomputed") == 100
    assert value("requests_total", outcome="reused", reason="") == 2
    assert value("requests_total", outcome="bypassed", reason="too_few_reused_tokens") == 4
    assert value("match_seconds_count") == 4
    assert value("match_seconds_sum") == pytest.approx(0.008)
    assert value("align_seconds_count") == 0
    audited = {"policy": "shift", "namespace_class": "docs"}
    assert value("audits_total", **audited, outcome="compared") == 2
    assert value("audits_total", **audited, outcome="busy") == 2
    assert value("audit_kl_count", **audited) == 2
    assert value("audit_kl_sum", **audited) == 0.5
    assert value("audit_tokens_total", **audited, agreement="same") == 10
    assert value("audit_tokens_total", **audited, agreement="other") == 6
    assert value("audit_drifted_total", namespace_class="docs", change="drifted") == 2
    assert value("audit_log_errors_total") == 2


def test_every_series_has_its_name_labels_and_buckets(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    found = {metric.name: metric for metric in registry.collect()}
    assert set(found) == {
        "vllm:segreuse_tokens",
        "vllm:segreuse_observed_tokens",
        "vllm:segreuse_requests",
        "vllm:segreuse_frozen_share",
        "vllm:segreuse_state_bytes",
        "vllm:segreuse_not_finite",
        "vllm:segreuse_drift",
        "vllm:segreuse_in_full",
        "vllm:segreuse_boundary_drift",
        "vllm:segreuse_similar_segments",
        "vllm:segreuse_audits",
        "vllm:segreuse_audit_kl",
        "vllm:segreuse_audit_tokens",
        "vllm:segreuse_audit_drifted",
        "vllm:segreuse_audit_log_errors",
        "vllm:segreuse_match_seconds",
        "vllm:segreuse_similar_seconds",
        "vllm:segreuse_align_seconds",
        "vllm:segreuse_sparse_pass_seconds",
        "vllm:segreuse_tier_records",
        "vllm:segreuse_tier_bytes",
        "vllm:segreuse_tier_tokens",
        "vllm:segreuse_tier_dropped",
        "vllm:segreuse_tier_files",
        "vllm:segreuse_tier_wait_seconds",
    }
    assert {one.type for one in found.values()} == {"counter", "gauge", "histogram"}
    samples = {sample.name: sample for one in found.values() for sample in one.samples}
    assert set(samples["vllm:segreuse_tokens_total"].labels) == {"model_name", "engine", "kind"}
    assert set(samples["vllm:segreuse_requests_total"].labels) == {
        *("model_name", "engine", "outcome", "reason")
    }
    kinds = {s.labels["kind"] for s in found["vllm:segreuse_tokens"].samples if "kind" in s.labels}
    known = {"prefix", "reused", "recomputed", "exact", "similar", "entering", "tiered", "new"}
    assert kinds == known
    edges = [
        s.labels["le"] for s in found["vllm:segreuse_align_seconds"].samples if "le" in s.labels
    ]
    bounds = sorted({float(edge) for edge in edges})
    assert (bounds[0], bounds[-2]) == (pytest.approx(1e-5), 30.0)
    assert len(bounds) == 21


def test_times_fall_into_the_histogram_of_their_name(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    stats = SegReuseStats()
    for timing, seconds in (("match", 0.25), ("align", 0.5), ("sparse_pass", 1.5)):
        stats.observe(timing, seconds)  # type: ignore[arg-type]
    metrics.observe(over_the_wire(stats))
    labels = {"model_name": "m", "engine": "0"}
    for timing, seconds in (("match", 0.25), ("align", 0.5), ("sparse_pass", 1.5)):
        name = f"vllm:segreuse_{timing}_seconds_sum"
        assert registry.get_sample_value(name, labels) == seconds


def test_the_second_tier_is_counted_by_what_was_done(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    stats = SegReuseStats()
    stats.note_tier("host", 5, 500)
    stats.note_tier("host", 3, 300)
    stats.count_tier_tokens("stored", 48)
    stats.count_tier_dropped("full", 2)
    stats.count_tier_files("shared", 7)
    metrics.observe(over_the_wire(stats))
    metrics.observe(over_the_wire(stats))
    labels = {"model_name": "m", "engine": "0"}
    for name, more, value in (
        ("records", {"tier": "host"}, 3),
        ("bytes", {"tier": "host"}, 300),
        ("bytes", {"tier": "disk"}, 0),
        ("tokens_total", {"move": "stored"}, 96),
        ("tokens_total", {"move": "loaded"}, 0),
        ("dropped_total", {"reason": "full"}, 4),
        ("files_total", {"event": "shared"}, 14),
        ("files_total", {"event": "found"}, 0),
    ):
        assert registry.get_sample_value(f"vllm:segreuse_tier_{name}", labels | more) == value


def test_other_engine_reads_zero_not_absent(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    metrics.observe(over_the_wire(filled()), engine_idx=1)
    text = generate_latest(registry).decode()
    assert 'vllm:segreuse_tokens_total{engine="0",kind="reused",model_name="m"} 0.0' in text
    assert 'vllm:segreuse_sparse_pass_seconds_count{engine="0",model_name="m"} 0.0' in text
