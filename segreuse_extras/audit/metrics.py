# SPDX-License-Identifier: Apache-2.0
"""Metrics of audits."""

from typing import Literal, get_args

from prometheus_client import Counter, Histogram

from vllm_segreuse.engine.metrics import Labels, Metric

AuditOutcome = Literal["compared", "busy", "limit", "too_long", "ended", "failed"]

_KL_BUCKETS = (*(m * 10.0**e for e in (-4, -3, -2, -1) for m in (1, 3)), 1.0, 3.0, 10.0)
_AUDITED: Labels = {"policy": (), "namespace_class": ()}

METRICS = (
    Metric(
        "audits_total",
        Counter,
        "Requests that were sampled for an audit, by the outcome of the audit.",
        {**_AUDITED, "outcome": get_args(AuditOutcome)},
    ),
    Metric(
        "audit_kl",
        Histogram,
        "KL divergence of the first token's distribution from that of full prefill, in nats, of "
        "audited requests.",
        _AUDITED,
        buckets=_KL_BUCKETS,
    ),
    Metric(
        "audit_tokens_total",
        Counter,
        "Tokens of audited answers, by whether the most likely token of full prefill is the same.",
        {**_AUDITED, "agreement": ("same", "other")},
    ),
    Metric(
        "audit_drifted_total",
        Counter,
        "Namespaces that have drifted (their audits were above max_kl), or have recovered.",
        {"namespace_class": (), "change": ("drifted", "recovered")},
    ),
    Metric("audit_log_errors_total", Counter, "Lines of the audit log that could not be written."),
)
