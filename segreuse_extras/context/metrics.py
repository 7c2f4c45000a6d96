# SPDX-License-Identifier: Apache-2.0
"""Metrics of contexts."""

from prometheus_client import Counter

from vllm_segreuse.engine.metrics import Metric

OTHER_CONTEXT = "other_context_tokens_total"

METRICS = (
    Metric(
        OTHER_CONTEXT,
        Counter,
        "Tokens that were found and not reused, since their KV was computed behind text that is "
        "not in front of them any more (context=same).",
    ),
)
