# SPDX-License-Identifier: Apache-2.0
"""What the connector counts is what `/metrics` shows, after a trip between processes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_segreuse.config.metrics import SegReusePromMetrics, SegReuseStats
from vllm_segreuse.engine.metrics import Metric

AUDITED = {"policy": "shift", "namespace_class": "docs"}


def filled() -> SegReuseStats:
    stats = SegReuseStats()
    stats.inc("tokens_total", 32, kind="prefix")
    stats.inc("tokens_total", 900, kind="reused")
    stats.inc("tokens_total", 100, kind="reused")
    stats.inc("tokens_total", 100, kind="recomputed")
    stats.inc("tokens_total", 64, kind="exact")
    stats.inc("tokens_total", 7, kind="new")
    stats.inc("observed_tokens_total", 300, kind="reused")
    stats.inc("observed_tokens_total", 50, kind="recomputed")
    stats.inc("requests_total", outcome="reused", reason="")
    stats.inc("requests_total", outcome="bypassed", reason="too_few_reused_tokens")
    stats.inc("requests_total", outcome="bypassed", reason="too_few_reused_tokens")
    stats.observe("match_seconds", 0.001)
    stats.observe("match_seconds", 0.003)
    stats.set("frozen_share", 0.5)
    stats.set("frozen_share", 0.25)
    stats.set("state_bytes", 4096)
    for _ in range(3):
        stats.inc("not_finite_total")
    for drift in (2.5, 7.0):
        stats.observe("drift", drift)
    stats.inc("in_full_total")
    for drift in (0.25, 0.75):
        stats.observe("boundary_drift", drift)
    stats.inc("similar_segments_total", 1, outcome="accepted")
    stats.inc("similar_segments_total", 3, outcome="rejected")
    stats.inc("audits_total", **AUDITED, outcome="compared")
    stats.inc("audits_total", **AUDITED, outcome="busy")
    stats.observe("audit_kl", 0.25, **AUDITED)
    stats.inc("audit_tokens_total", 5, **AUDITED, agreement="same")
    stats.inc("audit_tokens_total", 3, **AUDITED, agreement="other")
    stats.inc("audit_drifted_total", namespace_class="docs", change="drifted")
    stats.inc("audit_log_errors_total")
    return stats


def over_the_wire(stats: SegReuseStats) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))


def prom_metrics(registry: CollectorRegistry, **rows: Any) -> SegReusePromMetrics:
    def bound(kind: type) -> Any:
        return lambda **kwargs: kind(**kwargs, registry=registry)

    return SegReusePromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        {kind: bound(kind) for kind in (Gauge, Counter, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
        **rows,
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> SegReusePromMetrics:
    return prom_metrics(registry)


def test_survives_the_trip_between_processes() -> None:
    stats = filled()
    assert SegReuseStats(data=over_the_wire(stats)) == stats


def test_what_was_counted_is_shown_without_the_rows_of_all_metrics() -> None:
    stats = SegReuseStats()
    stats.inc("tokens_total", 3, kind="exact")
    assert repr(stats) == "SegReuseStats(data={'tokens_total': {'exact': 3}})"
    others: list[Metric] = [*stats.metrics][:-1]
    assert SegReuseStats(data=stats.data, metrics=others) == stats, "only what was counted counts"


def test_empty_until_something_is_counted() -> None:
    stats = SegReuseStats()
    assert stats.is_empty()
    stats.inc("tokens_total", 0, kind="new")
    assert stats.is_empty()
    stats.inc("requests_total", outcome="bypassed", reason="disabled")
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


@pytest.mark.parametrize(
    "count",
    [
        lambda stats: stats.inc("tokens_total", 1, kind="exact"),
        lambda stats: stats.inc("tokens_total", 1, kind="similar"),
        lambda stats: stats.inc("requests_total", outcome="reused", reason=""),
        lambda stats: stats.observe("align_seconds", 0.5),
        lambda stats: stats.set("frozen_share", 0.0),
        lambda stats: stats.set("state_bytes", 0),
        lambda stats: stats.inc("not_finite_total"),
        lambda stats: stats.observe("drift", 0.0),
        lambda stats: stats.observe("audit_kl", 0.0, **AUDITED),
        lambda stats: stats.inc("audits_total", **AUDITED, outcome="busy"),
        lambda stats: stats.inc("audit_log_errors_total"),
        lambda stats: stats.set("tier_records", 0, tier="host"),
        lambda stats: stats.inc("tier_files_total", 1, event="found"),
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
    stats.inc("tokens_total", 1, kind="new")
    assert taken == filled()


def test_aggregate_adds() -> None:
    total = filled().aggregate(SegReuseStats(data=over_the_wire(filled())))
    assert total.data == {
        "tokens_total": {"prefix": 64, "reused": 2000, "recomputed": 200, "exact": 128, "new": 14},
        "observed_tokens_total": {"reused": 600, "recomputed": 100},
        "requests_total": {"reused": {"": 2}, "bypassed": {"too_few_reused_tokens": 4}},
        "match_seconds": [0.001, 0.003, 0.001, 0.003],
        "frozen_share": [0.5, 0.25, 0.5, 0.25],
        "state_bytes": [4096] * 2,
        "not_finite_total": 6,
        "drift": [2.5, 7.0, 2.5, 7.0],
        "in_full_total": 2,
        "boundary_drift": [0.25, 0.75, 0.25, 0.75],
        "similar_segments_total": {"accepted": 2, "rejected": 6},
        "audits_total": {"shift": {"docs": {"compared": 2, "busy": 2}}},
        "audit_kl": {"shift": {"docs": [0.25, 0.25]}},
        "audit_tokens_total": {"shift": {"docs": {"same": 10, "other": 6}}},
        "audit_drifted_total": {"docs": {"drifted": 2}},
        "audit_log_errors_total": 2,
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


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda stats: stats.inc("token_total"), "unknown counter 'token_total'; known: tokens_t"),
        (lambda stats: stats.inc("drift"), "unknown counter 'drift'"),
        (lambda stats: stats.set("drift", 1.0), "unknown gauge 'drift'"),
        (lambda stats: stats.observe("hash", 1.0), "unknown histogram 'hash'"),
        (lambda stats: stats.inc("tokens_total", kind="shifted"), "unknown kind 'shifted'"),
        (lambda stats: stats.inc("tokens_total"), "the labels of tokens_total are kind, not none"),
        (lambda stats: stats.inc("in_full_total", kind="x"), "in_full_total are none, not kind"),
    ],
)
def test_unknown_names_are_refused_where_they_are_counted(count: Any, message: str) -> None:
    stats = SegReuseStats()
    with pytest.raises(ValueError, match=message):
        count(stats)
    assert stats.data == {}


def test_a_row_is_all_that_a_metric_needs() -> None:
    row = Metric("probes_total", Counter, "Probes.", {"side": ("left", "right")})
    stats, registry = SegReuseStats(metrics=[row]), CollectorRegistry()
    metrics = prom_metrics(registry, metrics=[row])
    stats.inc("probes_total", 3, side="left")
    metrics.observe(over_the_wire(stats.take()))
    stats.inc("probes_total", 4, side="left")
    metrics.observe(over_the_wire(stats))
    shown = {
        (sample.labels["engine"], sample.labels["side"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:segreuse_probes_total"
    }
    assert shown == {("0", "left"): 7, ("0", "right"): 0, ("1", "left"): 0, ("1", "right"): 0}


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
    assert value("boundary_drift_count") == 4
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
    assert value("audits_total", **AUDITED, outcome="compared") == 2
    assert value("audits_total", **AUDITED, outcome="busy") == 2
    assert value("audit_kl_count", **AUDITED) == 2
    assert value("audit_kl_sum", **AUDITED) == 0.5
    assert value("audit_tokens_total", **AUDITED, agreement="same") == 10
    assert value("audit_tokens_total", **AUDITED, agreement="other") == 6
    assert value("audit_drifted_total", namespace_class="docs", change="drifted") == 2
    assert value("audit_log_errors_total") == 2


def test_every_series_has_its_name_labels_and_buckets(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    found = {metric.name: metric for metric in registry.collect()}
    assert set(found) == {
        "vllm:segreuse_tokens",
        "vllm:segreuse_other_context_tokens",
        "vllm:segreuse_healed_tokens",
        "vllm:segreuse_healings",
        "vllm:segreuse_observed_tokens",
        "vllm:segreuse_requests",
        "vllm:segreuse_frozen_share",
        "vllm:segreuse_state_bytes",
        "vllm:segreuse_state_maps",
        "vllm:segreuse_state_maps_evicted",
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
        stats.observe(f"{timing}_seconds", seconds)
    metrics.observe(over_the_wire(stats))
    labels = {"model_name": "m", "engine": "0"}
    for timing, seconds in (("match", 0.25), ("align", 0.5), ("sparse_pass", 1.5)):
        name = f"vllm:segreuse_{timing}_seconds_sum"
        assert registry.get_sample_value(name, labels) == seconds


def test_the_second_tier_is_counted_by_what_was_done(
    registry: CollectorRegistry, metrics: SegReusePromMetrics
) -> None:
    stats = SegReuseStats()
    for records in (5, 3):
        stats.set("tier_records", records, tier="host")
        stats.set("tier_bytes", records * 100, tier="host")
    stats.inc("tier_tokens_total", 48, move="stored")
    stats.inc("tier_dropped_total", 2, reason="full")
    stats.inc("tier_files_total", 7, event="shared")
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
