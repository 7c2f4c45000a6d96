# SPDX-License-Identifier: Apache-2.0
"""Metrics of the second tier."""

from prometheus_client import Counter, Gauge

from vllm_segreuse.engine.metrics import Labels, Metric, seconds

_TIER: Labels = {"tier": ("host", "disk")}

METRICS = (
    seconds(
        "tier_wait",
        "Time that a request has waited for records of the second tier that were in "
        "files, in seconds.",
    ),
    Metric(
        "tier_records",
        Gauge,
        "KV blocks in the second tier, by tier. A block may be in both.",
        _TIER,
    ),
    Metric("tier_bytes", Gauge, "Bytes of the KV blocks in the second tier, by tier.", _TIER),
    Metric(
        "tier_tokens_total",
        Counter,
        "Tokens whose KV was stored in host memory, or loaded from it for a request, in whole KV "
        "blocks.",
        {"move": ("stored", "loaded")},
    ),
    Metric(
        "tier_dropped_total",
        Counter,
        "KV blocks that could not be stored, by reason: full (no row of host memory could be "
        "replaced), failed (the copy raised an error), codec (it cannot store their values), "
        "decoded (their KV was loaded from a record of a codec that rounds).",
        {"reason": ()},
    ),
    Metric(
        "tier_files_total",
        Counter,
        "KV blocks in files, by event: stored, loaded, "
        "removed; found (another engine has written them), shared (those of them that were "
        "loaded); not stored: full, busy, paused, no_space, io_error; lost: missing, torn, "
        "corrupt, unreadable; either: stalled.",
        {"event": ()},
        zeros=(("stored",), ("loaded",), ("found",), ("shared",)),
    ),
)
