# SPDX-License-Identifier: Apache-2.0
"""vLLM counts as hits of the connector what was really not computed."""

from typing import Any

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_segreuse.compat import prefix_cache_stats

SOURCE = CacheHitSource.EXTERNAL_UNSPECIFIED


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCacheStats, "record", PrefixCacheStats.record)
    prefix_cache_stats.install()


@pytest.mark.parametrize(
    ("sources", "hits"), [({SOURCE: 60}, 60), ({}, 0), (None, 99)], ids=["some", "none", "others"]
)
def test_hits_are_the_sum_of_their_sources(sources: Any, hits: int) -> None:
    """Callers that name no sources, as of vLLM's own cache, see no change."""
    stats = PrefixCacheStats()
    stats.record(100, 99, False, sources)
    assert (stats.queries, stats.hits) == (100, hits)


def test_a_preempted_requests_are_apart() -> None:
    stats = PrefixCacheStats()
    stats.record(num_tokens=100, num_hits=99, preempted=True, hits_by_source={SOURCE: 60})
    assert (stats.hits, stats.preempted_hits) == (0, 60)


def test_it_is_wrapped_once() -> None:
    once = PrefixCacheStats.record
    prefix_cache_stats.install()
    assert PrefixCacheStats.record is once
