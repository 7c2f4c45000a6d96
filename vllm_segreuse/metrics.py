# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of segment reuse, from the connector to `/metrics`.

The connector counts into a `SegReuseStats`; vLLM sends its `data` (plain dicts, lists and numbers)
with the step's statistics to the API server, where `SegReusePromMetrics` adds it to Prometheus.
vLLM's own labels (`model_name`, `engine`) come first on every metric.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

TokenKind = Literal[
    "prefix", "reused", "recomputed", "exact", "similar", "entering", "tiered", "new"
]
ObservedKind = Literal["reused", "recomputed"]
Outcome = Literal["reused", "bypassed"]
Timing = Literal["match", "similar", "align", "sparse_pass", "tier_wait"]
TierName = Literal["host", "disk"]
TierMove = Literal["stored", "loaded"]
AuditOutcome = Literal["compared", "busy", "limit", "too_long", "ended", "failed"]
DriftChange = Literal["drifted", "recovered"]

TOKEN_KINDS: tuple[TokenKind, ...] = (
    *("prefix", "reused", "recomputed", "exact", "similar", "entering", "tiered", "new"),
)
ACCEPTANCE_OUTCOMES = ("accepted", "rejected")
TIER_NAMES: tuple[TierName, ...] = ("host", "disk")
TIER_MOVES: tuple[TierMove, ...] = ("stored", "loaded")
OBSERVED_KINDS: tuple[ObservedKind, ...] = ("reused", "recomputed")
TIMINGS: dict[Timing, str] = {
    "match": "Time to match a request's prompt against the index, in seconds.",
    "similar": "Time to search for similar segments when a request arrives, outside of the "
    "scheduling loop, in seconds.",
    "align": "Time to copy and rotate the reused KV of a step, in seconds.",
    "sparse_pass": "Time of a step's sparse prefill pass, in seconds.",
    "tier_wait": "Time that a request has waited for records of the second tier that were in "
    "files, in seconds.",
}

_BUCKETS_S = (
    *(m * 10.0**e for e in (-5, -4, -3, -2, -1) for m in (1, 2.5, 5)),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_DRIFT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
_BOUNDARY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5)
_KL_BUCKETS = (*(m * 10.0**e for e in (-4, -3, -2, -1) for m in (1, 3)), 1.0, 3.0, 10.0)


def _no_data() -> dict[str, Any]:
    return {
        "tokens": {},
        "observed": {},
        "requests": {},
        "frozen": [],
        "states": [],
        "seconds": {},
        "repeated": 0,
        "drift": [],
        "in_full": 0,
        "boundary_drift": [],
        "accepted": 0,
        "rejected": 0,
        "audits": [],
        "compared": [],
        "drifted": [],
        "audit_log_errors": 0,
        "tier": [],
        "tier_tokens": {},
        "tier_dropped": {},
        "tier_files": {},
    }


@dataclass
class SegReuseStats(KVConnectorStats):
    """What happened since the last report; merges with `aggregate`, starts over with `reset`.

    `data` holds `tokens` and `observed` {kind: n}, `requests` {outcome: {reason: n}}, `frozen`
    [share, whenever it has changed], `states` [bytes, once], `seconds` {timing: [s]}, `repeated` n,
    `drift` [of a request], `in_full` n, `boundary_drift` [of a similar segment], `accepted` and
    `rejected` n of these, and of audits: `audits` [[policy, class, outcome]], `compared` [[policy,
    class, KL, agreed, tokens]], `drifted` [[class, change]] and `audit_log_errors` n. Of the second
    tier: `tier` [[tier, records, bytes], whenever they have changed], `tier_tokens` {stored or
    loaded: n}, `tier_dropped` {reason: n} and `tier_files` {event: n}.
    An instance made from the `data` of another process is equal to the original.
    """

    data: dict[str, Any] = field(default_factory=_no_data)

    def count_tokens(self, kind: TokenKind, n: int) -> None:
        """Adds `n` prompt tokens of `kind`. prefix + reused + new = prompt; recomputed, exact,
        similar and tiered are parts of reused, entering of similar."""
        if kind not in TOKEN_KINDS:
            raise ValueError(f"unknown kind of tokens {kind!r}; known are {', '.join(TOKEN_KINDS)}")
        _add(self.data["tokens"], kind, n)

    def count_observed(self, kind: ObservedKind, n: int) -> None:
        """Adds `n` prompt tokens that would have been reused, or computed again of these."""
        _add(self.data["observed"], kind, n)

    def count_request(self, outcome: Outcome, reason: str = "") -> None:
        """Adds one request; `reason` says why it was bypassed, and is empty if it was reused."""
        _add(self.data["requests"].setdefault(outcome, {}), reason, 1)

    def observe(self, timing: Timing, seconds: float) -> None:
        """Adds one measurement of `timing`."""
        if timing not in TIMINGS:
            raise ValueError(f"unknown timing {timing!r}; known are {', '.join(TIMINGS)}")
        self.data["seconds"].setdefault(timing, []).append(seconds)

    def note_frozen(self, share: float) -> None:
        """The share of the KV blocks that knowledge bases keep has changed to this."""
        self.data["frozen"].append(share)

    def note_states(self, num_bytes: int) -> None:
        """Boundary states take so many bytes of a worker's memory."""
        self.data["states"].append(num_bytes)

    def count_repeated(self) -> None:
        """Adds a pass that met NaN or infinity: requests of it were computed again in full."""
        self.data["repeated"] += 1

    def observe_drift(self, drift: float, in_full: bool) -> None:
        """Adds a request's drift, and whether everything was computed because of it."""
        self.data["drift"].append(drift)
        self.data["in_full"] += in_full

    def observe_acceptance(self, drifts: Sequence[float], rejected: int) -> None:
        """Adds the similar segments of a request: how far off their halos were, and how many of
        them were rejected."""
        self.data["boundary_drift"].extend(filter(math.isfinite, drifts))
        self.data["accepted"] += len(drifts) - rejected
        self.data["rejected"] += rejected

    def count_audit(self, policy: str, namespace_class: str, outcome: AuditOutcome) -> None:
        """Adds an audit that has ended, or a drawn request that is not audited."""
        self.data["audits"].append([policy, namespace_class, outcome])

    def observe_compared(
        self, policy: str, namespace_class: str, kl: float, agreed: int, tokens: int
    ) -> None:
        """Adds what an audit has found: see `plan.AuditResult`."""
        self.data["compared"].append([policy, namespace_class, kl, agreed, tokens])

    def count_drifted(self, namespace_class: str, change: DriftChange) -> None:
        """Adds a namespace that has drifted, or recovered."""
        self.data["drifted"].append([namespace_class, change])

    def count_audit_log_error(self) -> None:
        """Adds a line that could not be written."""
        self.data["audit_log_errors"] += 1

    def note_tier(self, tier: TierName, records: int, num_bytes: int) -> None:
        """Part of the second tier holds so many records, of so many bytes."""
        self.data["tier"].append([tier, records, num_bytes])

    def count_tier_tokens(self, move: TierMove, n: int) -> None:
        """Adds tokens whose KV was stored in host memory, or loaded from there."""
        _add(self.data["tier_tokens"], move, n)

    def count_tier_dropped(self, reason: str, records: int) -> None:
        """Adds records that were to be stored, and were not."""
        _add(self.data["tier_dropped"], reason, records)

    def count_tier_files(self, event: str, records: int) -> None:
        """Adds records to which this has happened in files."""
        _add(self.data["tier_files"], event, records)

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reset(self) -> None:
        # A new dict: whoever holds the old one may still have to send it.
        self.data = _no_data()

    def take(self) -> Self:
        """The statistics so far; the object itself starts over."""
        taken = type(self)(data=self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Adds what `other` counted, and returns itself."""
        _add_all(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth of figures for vLLM's periodic log."""
        tokens, requests = self.data["tokens"], self.data["requests"]
        summary: dict[str, int | float] = {
            f"segreuse {outcome} requests": sum(reasons.values())
            for outcome, reasons in requests.items()
        }
        summary |= {
            f"segreuse {kind} tokens": tokens[kind] for kind in TOKEN_KINDS if kind in tokens
        }
        for timing, values in self.data["seconds"].items():
            summary[f"segreuse avg {timing} (ms)"] = round(1e3 * sum(values) / len(values), 3)
        return summary


class SegReusePromMetrics(KVConnectorPromMetrics):
    """The `vllm:segreuse_*` metrics of one API server, all engines."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[Counter]
        histogram: Any = metric_types[Histogram]
        self._tokens = counter(
            name="vllm:segreuse_tokens_total",
            documentation="Prompt tokens of requests with extra keys. "
            "prefix + reused + new = prompt; recomputed, exact, similar and tiered (from the "
            "second tier) are parts of reused, entering (computed at the upper layers) of similar.",
            labelnames=[*labelnames, "kind"],
        )
        self._observed = counter(
            name="vllm:segreuse_observed_tokens_total",
            documentation="Prompt tokens that would have been reused, and those of them that would "
            "have been computed again, of requests that are only observed.",
            labelnames=[*labelnames, "kind"],
        )
        self._requests = counter(
            name="vllm:segreuse_requests_total",
            documentation="Requests with extra keys, by outcome and, if bypassed, the reason.",
            labelnames=[*labelnames, "outcome", "reason"],
        )
        gauge: Any = metric_types[Gauge]
        self._frozen = gauge(
            name="vllm:segreuse_frozen_share",
            documentation="Share of the KV blocks that knowledge bases keep, 0 to 1, as of the "
            "engine's last step.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._states = gauge(
            name="vllm:segreuse_state_bytes",
            documentation="Memory of the boundary states of one worker, beside its KV cache.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._seconds = {
            timing: histogram(
                name=f"vllm:segreuse_{timing}_seconds",
                documentation=documentation,
                buckets=_BUCKETS_S,
                labelnames=labelnames,
            )
            for timing, documentation in TIMINGS.items()
        }
        self._repeated = counter(
            name="vllm:segreuse_not_finite_total",
            documentation="Passes that met NaN or infinity: requests were computed again in "
            "full. A pass counts once, whatever the number of its requests and workers.",
            labelnames=labelnames,
        )
        self._drift = histogram(
            name="vllm:segreuse_drift",
            documentation="How far reused KV was from what the new context makes of it, by request "
            "(see the report's `drift`).",
            buckets=_DRIFT_BUCKETS,
            labelnames=labelnames,
        )
        self._in_full = counter(
            name="vllm:segreuse_in_full_total",
            documentation="Requests that were computed in full after all, because their drift was "
            "above max_drift.",
            labelnames=labelnames,
        )
        self._boundary_drift = histogram(
            name="vllm:segreuse_boundary_drift",
            documentation="How far the first tokens of similar segments were from those of their "
            "donors, by segment (see docs/similar.md).",
            buckets=_BOUNDARY_BUCKETS,
            labelnames=labelnames,
        )
        self._tested = counter(
            name="vllm:segreuse_similar_segments_total",
            documentation="Similar segments that were tested, by whether they were accepted.",
            labelnames=[*labelnames, "outcome"],
        )
        audited = [*labelnames, "policy", "namespace_class"]
        self._audits = counter(
            name="vllm:segreuse_audits_total",
            documentation="Requests that were drawn for an audit, by what came of it.",
            labelnames=[*audited, "outcome"],
        )
        self._audit_kl = histogram(
            name="vllm:segreuse_audit_kl",
            documentation="Divergence of the first token's distribution from that of full prefill, "
            "in nats, of audited requests.",
            buckets=_KL_BUCKETS,
            labelnames=audited,
        )
        self._audit_tokens = counter(
            name="vllm:segreuse_audit_tokens_total",
            documentation="Tokens of audited answers, by whether full prefill has the same most "
            "likely token there.",
            labelnames=[*audited, "agreement"],
        )
        self._drifted = counter(
            name="vllm:segreuse_audit_drifted_total",
            documentation="Namespaces whose audits were above max_kl, and those that have "
            "recovered from it.",
            labelnames=[*labelnames, "namespace_class", "change"],
        )
        self._audit_log_errors = counter(
            name="vllm:segreuse_audit_log_errors_total",
            documentation="Lines of the audit log that could not be written.",
            labelnames=labelnames,
        )
        self._tier_records = gauge(
            name="vllm:segreuse_tier_records",
            documentation="KV blocks that the second tier holds, by tier; one may be in both.",
            labelnames=[*labelnames, "tier"],
            multiprocess_mode="mostrecent",
        )
        self._tier_bytes = gauge(
            name="vllm:segreuse_tier_bytes",
            documentation="Bytes of the KV blocks that the second tier holds, by tier.",
            labelnames=[*labelnames, "tier"],
            multiprocess_mode="mostrecent",
        )
        self._tier_tokens = counter(
            name="vllm:segreuse_tier_tokens_total",
            documentation="Tokens whose KV was stored in host memory, or loaded from there by a "
            "plan, in whole KV blocks.",
            labelnames=[*labelnames, "move"],
        )
        self._tier_dropped = counter(
            name="vllm:segreuse_tier_dropped_total",
            documentation="KV blocks that were to be stored and were not, by reason: full (no row "
            "of host memory could be replaced), failed (the copy raised an error), codec "
            "(numbers that it cannot store), decoded (read from a record of a codec that rounds).",
            labelnames=[*labelnames, "reason"],
        )
        self._tier_files = counter(
            name="vllm:segreuse_tier_files_total",
            documentation="KV blocks in files, by what has become of them: stored, loaded, "
            "removed; found (another engine has written them), shared (those of them that were "
            "loaded); not stored: full, busy, paused, no_space, io_error; lost: missing, torn, "
            "corrupt, unreadable; either: stalled.",
            labelnames=[*labelnames, "event"],
        )
        for engine in per_engine_labelvalues:
            self._touch(engine)

    def _touch(self, engine: int) -> None:
        """Creates the series whose labels are known, so that they read 0 rather than absent."""
        labels = self.per_engine_labelvalues[engine]
        for kind in TOKEN_KINDS:
            self._tokens.labels(*labels, kind)
        for observed in OBSERVED_KINDS:
            self._observed.labels(*labels, observed)
        self._requests.labels(*labels, "reused", "")
        self._frozen.labels(*labels)
        self._states.labels(*labels)
        self._repeated.labels(*labels)
        self._drift.labels(*labels)
        self._in_full.labels(*labels)
        self._boundary_drift.labels(*labels)
        for outcome in ACCEPTANCE_OUTCOMES:
            self._tested.labels(*labels, outcome)
        self._audit_log_errors.labels(*labels)
        for tier in TIER_NAMES:
            self._tier_records.labels(*labels, tier)
            self._tier_bytes.labels(*labels, tier)
        for move in TIER_MOVES:
            self._tier_tokens.labels(*labels, move)
        for event in ("stored", "loaded", "found", "shared"):
            self._tier_files.labels(*labels, event)
        for metric in self._seconds.values():
            metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for kind, n in transfer_stats_data["tokens"].items():
            self._tokens.labels(*labels, kind).inc(n)
        for kind, n in transfer_stats_data["observed"].items():
            self._observed.labels(*labels, kind).inc(n)
        for share in transfer_stats_data["frozen"][-1:]:
            self._frozen.labels(*labels).set(share)
        for num_bytes in transfer_stats_data["states"][-1:]:
            self._states.labels(*labels).set(num_bytes)
        for outcome, reasons in transfer_stats_data["requests"].items():
            for reason, n in reasons.items():
                self._requests.labels(*labels, outcome, reason).inc(n)
        self._repeated.labels(*labels).inc(transfer_stats_data["repeated"])
        self._in_full.labels(*labels).inc(transfer_stats_data["in_full"])
        _observe_all(self._drift.labels(*labels), transfer_stats_data["drift"])
        _observe_all(self._boundary_drift.labels(*labels), transfer_stats_data["boundary_drift"])
        for tested in ACCEPTANCE_OUTCOMES:
            self._tested.labels(*labels, tested).inc(transfer_stats_data[tested])
        for timing, values in transfer_stats_data["seconds"].items():
            _observe_all(self._seconds[timing].labels(*labels), values)
        self._observe_audits(transfer_stats_data, labels)
        self._observe_tier(transfer_stats_data, labels)

    def _observe_tier(self, data: dict[str, Any], labels: list[object]) -> None:
        for tier, records, num_bytes in data["tier"]:
            self._tier_records.labels(*labels, tier).set(records)
            self._tier_bytes.labels(*labels, tier).set(num_bytes)
        for move, n in data["tier_tokens"].items():
            self._tier_tokens.labels(*labels, move).inc(n)
        for reason, n in data["tier_dropped"].items():
            self._tier_dropped.labels(*labels, reason).inc(n)
        for event, n in data["tier_files"].items():
            self._tier_files.labels(*labels, event).inc(n)

    def _observe_audits(self, data: dict[str, Any], labels: list[object]) -> None:
        for policy, namespace_class, outcome in data["audits"]:
            self._audits.labels(*labels, policy, namespace_class, outcome).inc()
        for policy, namespace_class, kl, agreed, tokens in data["compared"]:
            audited = (*labels, policy, namespace_class)
            self._audit_kl.labels(*audited).observe(kl)
            self._audit_tokens.labels(*audited, "same").inc(agreed)
            self._audit_tokens.labels(*audited, "other").inc(tokens - agreed)
        for namespace_class, change in data["drifted"]:
            self._drifted.labels(*labels, namespace_class, change).inc()
        self._audit_log_errors.labels(*labels).inc(data["audit_log_errors"])


def _add(counts: dict[str, int], label: str, n: int) -> None:
    if n:
        counts[label] = counts.get(label, 0) + n


def _add_all(mine: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Adds numbers, joins lists, and does both within dictionaries."""
    for name, value in others.items():
        if isinstance(value, Mapping):
            _add_all(mine.setdefault(name, {}), value)
        else:
            mine[name] = mine.get(name, type(value)()) + value


def _observe_all(histogram: Any, values: Iterable[float]) -> None:
    for value in values:
        histogram.observe(value)
