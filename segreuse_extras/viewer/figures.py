# SPDX-License-Identifier: Apache-2.0
"""Our Prometheus metrics, as a page shows them.

Counters and histograms are sums over engines. Gauges are of each engine: shares, and what several
engines hold in common, have no sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

PREFIX = "vllm:segreuse_"
AUDIT = PREFIX + "audit"
_SUMMED = ("model_name", "engine", "le", "pid")
_SUMMED_OF_GAUGES = ("model_name", "pid")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Counter:
    """A single number: a counter or a gauge.

    Attributes:
        name: of the metric.
        labels: those that say what is counted, or of which engine a gauge is.
        value: since the server started, or, of a gauge, now.
    """

    name: str
    labels: Labels
    value: float

    @property
    def shown(self) -> str:
        """The value as text: whole numbers in full, others with six digits."""
        return f"{self.value:,.0f}" if self.value.is_integer() else f"{self.value:,.6g}"


@dataclass(frozen=True)
class Bucket:
    """Observations up to a bound, and above that of the bucket before.

    Attributes:
        bound: as Prometheus writes it.
        count: observations.
        share: of the fullest bucket, 0..1.
    """

    bound: str
    count: int
    share: float


@dataclass(frozen=True)
class Distribution:
    """A histogram with some observations.

    Attributes:
        name, help: of the metric.
        labels: those that say what is observed.
        count, mean: of the observations.
        buckets: from the first to the last that is not empty.
    """

    name: str
    help: str
    labels: Labels
    count: int
    mean: float
    buckets: list[Bucket]


@dataclass
class Figures:
    """All of them.

    Attributes:
        counters: and gauges, by name, in the registry's order.
        distributions: those with observations.
    """

    counters: list[Counter] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)

    def of_audit(self) -> Figures:
        """Those of the audit; empty where none is made."""
        return self._where(lambda name: name.startswith(AUDIT))

    def of_reuse(self) -> Figures:
        """All others."""
        return self._where(lambda name: not name.startswith(AUDIT))

    def _where(self, holds: Any) -> Figures:
        return Figures(
            [each for each in self.counters if holds(each.name)],
            [each for each in self.distributions if holds(each.name)],
        )

    def value(self, name: str, **labels: str) -> float:
        """Sum of the counters of a name, without prefix and "_total", that have these labels."""
        wanted = set(labels.items())
        return sum(
            each.value
            for each in self.counters
            if each.name == f"{PREFIX}{name}_total" and wanted <= set(each.labels)
        )


def figures(families: Iterable[Any]) -> Figures:
    """What a registry's `collect()` has of ours."""
    found = Figures()
    for family in families:
        if not family.name.startswith(PREFIX):
            continue
        if family.type == "histogram":
            found.distributions += _distributions(family)
        elif family.type in ("counter", "gauge"):
            found.counters += _counters(family)
    return found


def _counters(family: Any) -> Iterator[Counter]:
    summed = _SUMMED_OF_GAUGES if family.type == "gauge" else _SUMMED
    values: dict[tuple[str, Labels], float] = defaultdict(float)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            values[sample.name, _labels(sample, summed)] += sample.value
    for (name, labels), value in values.items():
        yield Counter(name, labels, value)


def _distributions(family: Any) -> Iterator[Distribution]:
    cumulative: dict[Labels, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    sums: dict[Labels, float] = defaultdict(float)
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            cumulative[_labels(sample)][sample.labels["le"]] += sample.value
        elif sample.name.endswith("_sum"):
            sums[_labels(sample)] += sample.value
    for labels, bounds in cumulative.items():
        ordered = sorted(bounds, key=float)
        upto = [round(bounds[bound]) for bound in ordered]
        counts = [n - before for n, before in zip(upto, [0, *upto], strict=False)]
        if not any(counts):
            continue
        filled = [i for i, n in enumerate(counts) if n]
        buckets = [
            Bucket(_bound(ordered[i]), counts[i], counts[i] / max(counts))
            for i in range(filled[0], filled[-1] + 1)
        ]
        mean = sums[labels] / upto[-1]
        yield Distribution(family.name, family.documentation, labels, upto[-1], mean, buckets)


def _bound(text: str) -> str:
    value = float(text)
    return "more" if math.isinf(value) else f"{value:g}"


def _labels(sample: Any, summed: tuple[str, ...] = _SUMMED) -> Labels:
    return tuple((name, value) for name, value in sample.labels.items() if name not in summed)
