# SPDX-License-Identifier: Apache-2.0
"""Our metrics, as a page shows them: sums over engines, and gauges of each."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from segreuse_extras.viewer.figures import Counter as Shown
from segreuse_extras.viewer.figures import Figures, figures


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    tokens = Counter("vllm:segreuse_tokens_total", "Tokens.", [*labels, "kind"], registry=registry)
    for engine, count in (("0", 30), ("1", 12)):
        tokens.labels("m", engine, "reused").inc(count)
        tokens.labels("m", engine, "new").inc(1)
    drift = Histogram(
        "vllm:segreuse_drift", "D.", labels, buckets=(0.5, 1, 2, 4), registry=registry
    )
    for engine, value in (("0", 0.7), ("0", 0.8), ("1", 1.5), ("1", 9)):
        drift.labels("m", engine).observe(value)
    Histogram("vllm:segreuse_match_seconds", "M.", labels, registry=registry).labels("m", "0")
    Counter("vllm:prompt_tokens", "vLLM's own.", registry=registry).inc(7)
    return registry


def test_counters_are_sums_over_engines(registry: CollectorRegistry) -> None:
    found = figures(registry.collect())
    shown = [(each.name, each.labels, each.value) for each in found.counters]
    assert shown == [
        ("vllm:segreuse_tokens_total", (("kind", "reused"),), 42),
        ("vllm:segreuse_tokens_total", (("kind", "new"),), 2),
    ]
    assert found.value("tokens", kind="reused") == 42
    assert found.value("tokens") == 44
    assert found.value("requests") == 0


def test_gauges_are_of_each_engine() -> None:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    frozen = Gauge("vllm:segreuse_frozen_share", "F.", labels, registry=registry)
    for engine, share in (("0", 0.75), ("1", 0.5)):
        frozen.labels("m", engine).set(share)
    found = figures(registry.collect()).counters
    assert [(each.labels, each.value) for each in found] == [
        ((("engine", "0"),), 0.75),
        ((("engine", "1"),), 0.5),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12345678.0, "12,345,678"), (0.123456789, "0.123457"), (float("inf"), "inf")],
)
def test_whole_numbers_are_shown_in_full(value: float, text: str) -> None:
    assert Shown("vllm:segreuse_tokens_total", (), value).shown == text


def test_distributions_have_counts_by_bucket(registry: CollectorRegistry) -> None:
    [drift] = figures(registry.collect()).distributions
    assert (drift.name, drift.count, drift.labels) == ("vllm:segreuse_drift", 4, ())
    assert drift.mean == pytest.approx((0.7 + 0.8 + 1.5 + 9) / 4)
    shown = [(bucket.bound, bucket.count, bucket.share) for bucket in drift.buckets]
    assert shown == [("1", 2, 1), ("2", 1, 0.5), ("4", 0, 0), ("more", 1, 0.5)]


def test_the_audit_has_a_place_of_its_own(registry: CollectorRegistry) -> None:
    assert figures(registry.collect()).of_audit() == Figures()
    kl = Histogram("vllm:segreuse_audit_kl", "KL.", ["policy"], registry=registry)
    Gauge("vllm:segreuse_audit_pending", "Waiting.", registry=registry).set(3)
    kl.labels("focus").observe(0.01)
    kl.labels("shift").observe(0.2)
    found = figures(registry.collect())
    audit = found.of_audit()
    assert [each.labels for each in audit.distributions] == [
        (("policy", "focus"),),
        (("policy", "shift"),),
    ]
    assert [each.value for each in audit.counters] == [3]
    assert [each.name for each in found.of_reuse().distributions] == ["vllm:segreuse_drift"]
