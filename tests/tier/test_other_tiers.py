# SPDX-License-Identifier: Apache-2.0
"""Behind vLLM's manager, the half that knows segments asks nothing of files that vLLM's own tiers
have not: here its `fs` stands in the place of our store."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.tiering.fs import manager as fs

from tests.tier.test_store import DOCUMENT, OTHER, stored
from tests.tier.world import World
from vllm_segreuse.plan import Tier


def spec() -> Any:
    """As much of vLLM's description of an engine as `fs` reads."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=[],
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=4),
    )
    events = SimpleNamespace(enable_kv_cache_events=True)
    return SimpleNamespace(config=config, kv_events_config=events, blocks_per_chunk=1)


def test_vllms_own_tier_of_files_holds_what_host_memory_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of 16 bytes are no pages of a disk.
    monkeypatch.setattr(fs, "probe_o_direct", lambda path: False)
    world = World(
        rows=3,
        wait_ms=60_000,
        behind=lambda view: fs.FileSystemTierManager(
            spec(), view, "fs", str(tmp_path), enable_kv_events=True
        ),
    )
    stored(world)
    written = world.region.memory.copy()
    until(world, lambda: world.tier.counts().disk == 3)
    stored(world, OTHER)
    assert world.tier.counts().host == 3
    until(world, lambda: world.tier.counts().disk == 6)
    pieces = until(world, lambda: world.hold("request", DOCUMENT))
    assert (pieces.source == Tier.HOST).all()
    assert pieces.length.sum() == len(DOCUMENT)
    rows = np.unique(pieces.block)
    assert sorted(map(bytes, world.region.memory[rows])) == sorted(map(bytes, written))
    world.tier.let_go("request")
    world.tier.left("request")
    world.check_idle()
    world.tier.close()


def until(world: World, found: Any) -> Any:
    """Steps go by until something is found."""
    for _ in range(1000):
        if result := found():
            return result
        world.step()
        time.sleep(0.01)
    raise AssertionError(world.tier.counts())
