# SPDX-License-Identifier: Apache-2.0
"""Hundreds of requests where states are composed, with too little room for maps and for KV; and
that the soak notices what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.recurrent import AffineMap, RecurrentLayer
from tests.e2e import states_soak
from tests.e2e.engine import Engine
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.scheduling.tracked import TrackedRequest

pytestmark = pytest.mark.slow(
    "hundreds of requests, and little room", instead="e2e/test_composed_states"
)
REQUESTS, FEW = 300, 72
LIMITS: dict[str, Any] = states_soak.LIMITS | {"num_gpu_blocks_override": states_soak.NUM_BLOCKS}


@pytest.fixture(scope="module")
def alone() -> dict[int, states_soak.Answer]:
    """What vLLM alone answers, by number."""
    with states_soak.small_engine(segreuse=False) as plain:
        asked = states_soak.requests(plain.vocab_size, REQUESTS)
        return states_soak.answers(plain, asked, 1)


@pytest.fixture
def running(alone: dict[int, states_soak.Answer]) -> Iterator[Engine]:
    with states_soak.small_engine(segreuse=True, **LIMITS) as started:
        yield started


def test_hundreds_of_requests(running: Engine, alone: dict[int, states_soak.Answer]) -> None:
    soak = states_soak.Soak(running)
    soak.run(states_soak.requests(running.vocab_size, REQUESTS))
    states_soak.compared(soak.exact, alone)
    found = states_soak.figures(soak)
    assert not found["read_otherwise"]
    expected = {*states_soak.COUNTED, "maps_evicted", "kv_evicted", "repeated", "names"}
    for what in expected - {"read_otherwise", "bit_equal"}:
        assert found[what], what


def _never_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Captures, "drop", lambda *_: None)


def _named_exactly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrackedRequest, "exact_ends", property(lambda self: (10**9, 10**9)))


def _another_map(patch: pytest.MonkeyPatch) -> None:
    """One that differs whenever the same segment is noted again."""
    calls = count()

    def compact(self: AffineMap) -> AffineMap:
        product = self.product.bfloat16() / (1 + next(calls))
        return AffineMap(self.tail.clone(), product, self.added.bfloat16())

    patch.setattr(AffineMap, "compact", compact)


def _composed_otherwise(patch: pytest.MonkeyPatch) -> None:
    compose = RecurrentLayer.compose
    patch.setattr(RecurrentLayer, "compose", lambda *given: [compose(*given), compose(*given)][0])


def _held_for_ever(patch: pytest.MonkeyPatch) -> None:
    unpin = SegmentBlockPool.unpin
    patch.setattr(SegmentBlockPool, "unpin", lambda self, blocks: unpin(self, blocks[:-1]))


@pytest.mark.parametrize(
    "fault", [_never_dropped, _named_exactly, _another_map, _composed_otherwise, _held_for_ever]
)
def test_the_soak_notices(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that has the fault from its start on, if start-up does not refuse it."""
    with states_soak.small_engine(segreuse=True, **LIMITS) as broken:
        fault(monkeypatch)
        soak = states_soak.Soak(broken, reset_every=1)
        with pytest.raises(AssertionError):
            soak.run(states_soak.requests(broken.vocab_size, FEW))
