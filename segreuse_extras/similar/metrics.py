# SPDX-License-Identifier: Apache-2.0
"""Metrics of similar segments."""

from prometheus_client import Counter, Gauge, Histogram

from vllm_segreuse.engine.metrics import Metric, seconds

_BOUNDARY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5)

METRICS = (
    Metric(
        "state_bytes", Gauge, "Memory of the boundary states of one worker, beside its KV cache."
    ),
    seconds(
        "similar",
        "Time to search for similar segments when a request arrives, outside of the "
        "scheduling loop, in seconds.",
    ),
    Metric(
        "boundary_drift",
        Histogram,
        "Distance between the first tokens of a similar segment and those of its donor, by segment "
        "(see docs/similar.md).",
        buckets=_BOUNDARY_BUCKETS,
    ),
    Metric(
        "similar_segments_total",
        Counter,
        "Similar segments that were tested, by result.",
        {"outcome": ("accepted", "rejected")},
    ),
)
