# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.metrics.stats.PrefixCacheStats`: what was really not computed counts as a hit.

The scheduler (`v1/core/sched/scheduler.py`) records every token a connector supplies as a hit. Ours
supplies most tokens of a prompt and computes some of them itself; how many were saved it reports
through `get_external_cache_hit_sources`, whose sum is meant to be the number of hits.

Obsolete when the scheduler counts the sum of `get_external_cache_hit_sources`. None filed that we
know of; vllm-project/vllm#30522 defined what the counters count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap `PrefixCacheStats.record`, once. Other callers give no sources and see no change."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    wrap(PrefixCacheStats, "record", _record)


def _record(original: Callable[..., Any]) -> Callable[..., Any]:
    def record(
        self: Any,
        num_tokens: int,
        num_hits: int,
        preempted: bool,
        hits_by_source: dict[Any, int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if hits_by_source is not None:
            num_hits = sum(hits_by_source.values())
        original(self, num_tokens, num_hits, preempted, hits_by_source, *args, **kwargs)

    return record
