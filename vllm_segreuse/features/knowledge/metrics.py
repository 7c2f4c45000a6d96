# SPDX-License-Identifier: Apache-2.0
"""Metrics of knowledge bases."""

from prometheus_client import Gauge

from vllm_segreuse.engine.metrics import Metric

METRICS = (
    Metric(
        "frozen_share",
        Gauge,
        "Share of the KV blocks that are pinned for knowledge bases, 0 to 1, as of the engine's "
        "last step.",
    ),
)
