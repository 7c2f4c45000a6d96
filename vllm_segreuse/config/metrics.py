# SPDX-License-Identifier: Apache-2.0
"""The metrics of an engine, with those of all features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_segreuse.engine import metrics as core
from vllm_segreuse.features import having

METRICS: tuple[core.Metric, ...] = (
    *core.METRICS,
    *(row for module in having("metrics") for row in module.METRICS),
)
"""All of them, in the order in which `/metrics` shows them."""


@dataclass
class SegReuseStats(core.Counted):
    """What happened since the last report, of all metrics."""

    metrics: Sequence[core.Metric] = field(default=METRICS, repr=False, compare=False)


class SegReusePromMetrics(core.CountedProm):
    """The `vllm:segreuse_*` metrics of one API server, all engines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"metrics": METRICS, **kwargs})
