# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms of segment reuse: one table, from the connector to `/metrics`.

The connector counts into a `Counted`; vLLM sends its `data` (plain dicts, lists and numbers)
with the step's statistics to the API server, where `CountedProm` adds it to Prometheus.
vLLM's own labels (`model_name`, `engine`) come first on every metric.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

PREFIX = "vllm:segreuse_"

TokenKind = Literal[
    "prefix", "reused", "recomputed", "exact", "similar", "entering", "tiered", "new"
]

Labels = Mapping[str, tuple[str, ...]]
"""A metric's own labels, each with the values that it can have; without any, all strings."""


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        name: without `PREFIX`.
        kind: prometheus_client's `Counter`, `Gauge` or `Histogram`.
        help: what Prometheus shows beside it.
        labels: its own, behind those of vLLM.
        zeros: label values of series that read 0 rather than being absent before anything is
            counted. Those of a metric whose labels all list their values need not be named.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    kind: type[PromMetric]
    help: str
    labels: Labels = field(default_factory=dict)
    zeros: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()

    def values(self, labels: Mapping[str, str]) -> list[str]:
        """The values of its labels, in its order.

        Raises:
            ValueError: other labels, or a value that is not among those of its label.
        """
        if labels.keys() != self.labels.keys():
            own, given = (", ".join(names) or "none" for names in (self.labels, labels))
            raise ValueError(f"the labels of {self.name} are {own}, not {given}")
        for label, known in self.labels.items():
            if known and labels[label] not in known:
                raise ValueError(
                    f"unknown {label} {labels[label]!r} of {self.name}; known: {', '.join(known)}"
                )
        return [labels[label] for label in self.labels]

    def made(self, metric_types: Mapping[Any, Any], labelnames: Sequence[str]) -> Any:
        """The metric of Prometheus."""
        more: dict[str, Any] = {}
        if self.kind is Gauge:
            more["multiprocess_mode"] = "mostrecent"
        elif self.kind is Histogram:
            more["buckets"] = self.buckets
        return metric_types[self.kind](
            name=PREFIX + self.name,
            documentation=self.help,
            labelnames=[*labelnames, *self.labels],
            **more,
        )

    def first_series(self) -> Iterator[tuple[str, ...]]:
        """Label values of the series that there are before anything is counted."""
        return iter(self.zeros) if self.zeros else itertools.product(*self.labels.values())


_BUCKETS_S = (
    *(m * 10.0**e for e in (-5, -4, -3, -2, -1) for m in (1, 2.5, 5)),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_DRIFT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


def seconds(name: str, help: str) -> Metric:
    """A histogram of times."""
    return Metric(f"{name}_seconds", Histogram, help, buckets=_BUCKETS_S)


METRICS = (
    Metric(
        "tokens_total",
        Counter,
        "Prompt tokens of requests with extra keys. "
        "prefix + reused + new = prompt; recomputed, exact, similar and tiered (loaded from the "
        "second tier) are parts of reused; entering (computed from an upper layer on) is a part of "
        "similar.",
        {"kind": get_args(TokenKind)},
    ),
    Metric(
        "observed_tokens_total",
        Counter,
        "Prompt tokens of observed requests, which reuse nothing: those that would "
        "have been reused, and those of them that would have been recomputed.",
        {"kind": ("reused", "recomputed")},
    ),
    Metric(
        "requests_total",
        Counter,
        "Requests with extra keys, by outcome and, if bypassed, the reason.",
        {"outcome": ("reused", "bypassed"), "reason": ()},
        zeros=(("reused", ""),),
    ),
    seconds("match", "Time to match a request's prompt against the index, in seconds."),
    seconds("align", "Time to copy and rotate the reused KV of a step, in seconds."),
    seconds("sparse_pass", "Time of a step's sparse prefill pass, in seconds."),
    Metric(
        "not_finite_total",
        Counter,
        "Prefill passes that met NaN or infinity, after which their requests were computed in "
        "full. A pass counts once, however many requests and workers take part.",
    ),
    Metric(
        "drift",
        Histogram,
        "Distance between reused KV and the KV that the new context yields, by request (the "
        "report's `drift`).",
        buckets=_DRIFT_BUCKETS,
    ),
    Metric(
        "in_full_total",
        Counter,
        "Requests that were computed in full because their drift was above max_drift.",
    ),
)
"""Those that there are without features; each feature has rows of its own (`engine/metrics.py`)."""


@dataclass
class Counted(KVConnectorStats):
    """What happened since the last report; merges with `aggregate`, starts over with `reset`.

    `data` holds by the name of a metric what was counted: a number of a counter, the list of all
    values of a gauge or a histogram. Of a metric with labels it is a dict by the value of the first
    one, of such by the second, and so on: `{"requests_total": {"bypassed": {"disabled": 2}}}`.
    An instance made from the `data` of another process is equal to the original.

    Args:
        metrics: the rows of what can be counted.
    """

    data: dict[str, Any] = field(default_factory=dict)
    metrics: Sequence[Metric] = field(default=METRICS, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._rows = {metric.name: metric for metric in self.metrics}

    def inc(self, name: str, n: int = 1, **labels: str) -> None:
        """Adds `n` to a counter.

        Raises:
            ValueError: no such counter, or it has other labels.
        """
        self._add(Counter, name, n, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge.

        Raises:
            ValueError: no such gauge, or it has other labels.
        """
        self._add(Gauge, name, [value], labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds an observation to a histogram.

        Raises:
            ValueError: no such histogram, or it has other labels.
        """
        self._add(Histogram, name, [value], labels)

    def _add(self, kind: type[PromMetric], name: str, value: Any, labels: dict[str, str]) -> None:
        row = self._rows.get(name)
        if row is None or row.kind is not kind:
            known = ", ".join(each.name for each in self.metrics if each.kind is kind)
            raise ValueError(f"unknown {kind.__name__.lower()} {name!r}; known: {known}")
        *path, last = name, *row.values(labels)
        counted = self.data
        for key in path:
            counted = counted.setdefault(key, {})
        if last in counted:
            counted[last] += value
        else:
            counted[last] = value

    def is_empty(self) -> bool:
        return not any(leaf for counted in self.data.values() for _, leaf in _leaves(counted))

    def reset(self) -> None:
        # A new dict: whoever holds the old one may still have to send it.
        self.data = {}

    def take(self) -> Self:
        """The statistics so far; the object itself starts over."""
        taken = type(self)(data=self.data, metrics=self.metrics)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Adds what `other` counted, and returns itself."""
        _add_all(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth of figures for vLLM's periodic log."""
        requests, tokens = (self.data.get(name, {}) for name in ("requests_total", "tokens_total"))
        summary: dict[str, int | float] = {
            f"segreuse {outcome} requests": sum(reasons.values())
            for outcome, reasons in requests.items()
        }
        summary |= {
            f"segreuse {kind} tokens": tokens[kind]
            for kind in get_args(TokenKind)
            if tokens.get(kind)
        }
        for name, values in self.data.items():
            if name.endswith("_seconds"):
                mean_ms = round(1e3 * sum(values) / len(values), 3)
                summary[f"segreuse avg {name.removesuffix('_seconds')} (ms)"] = mean_ms
        return summary


class CountedProm(KVConnectorPromMetrics):
    """The `vllm:segreuse_*` metrics of one API server, all engines.

    Args:
        metrics: the rows of what is shown; all others are vLLM's.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            row.name: (row.kind, row.made(metric_types, labelnames)) for row in metrics
        }
        for labels in per_engine_labelvalues.values():
            for row in metrics:
                for values in row.first_series():
                    self._metrics[row.name][1].labels(*labels, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counted in transfer_stats_data.items():
            kind, metric = self._metrics[name]
            for values, leaf in _leaves(counted):
                series = metric.labels(*labels, *values)
                if kind is Counter:
                    series.inc(leaf)
                elif kind is Gauge:
                    series.set(leaf[-1])
                else:
                    for value in leaf:
                        series.observe(value)


def _leaves(counted: Any, values: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What was counted of a metric, by the values of its labels."""
    if not isinstance(counted, Mapping):
        yield values, counted
        return
    for value, below in counted.items():
        yield from _leaves(below, (*values, value))


def _add_all(mine: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Adds numbers, joins lists, and does both within dictionaries."""
    for name, value in others.items():
        if isinstance(value, Mapping):
            _add_all(mine.setdefault(name, {}), value)
        else:
            mine[name] = mine.get(name, type(value)()) + value
