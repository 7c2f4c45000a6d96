# SPDX-License-Identifier: Apache-2.0
"""Metrics of maps of states."""

from prometheus_client import Counter

from vllm_segreuse.engine.metrics import Metric

NOTED, EVICTED = "state_maps_total", "state_maps_evicted_total"

METRICS = (
    Metric(NOTED, Counter, "Segments whose change of linear attention's states was noted."),
    Metric(
        EVICTED,
        Counter,
        "Segments whose change of linear attention's states was dropped for others (state_bytes).",
    ),
)
