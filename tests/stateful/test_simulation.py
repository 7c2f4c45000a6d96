# SPDX-License-Identifier: Apache-2.0
"""Seeded runs with faults, a failing one of which says how to replay it."""

from collections import Counter
from typing import Any

import pytest

from tests.stateful import simulation
from tests.stateful.faults import OTHERS, SITES
from tests.stateful.simulation import SimulationError, simulate
from vllm_segreuse.policies import POLICIES

AT_PUSH = 63, 112, 116, 117, 123, 125, 130, 144
"""Seeds that together meet everything below; no fewer of those of the whole run do."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({127, *range(112, 126)} - {*AT_PUSH}))
def test_20_21_22_23_27_nothing_goes_wrong_with_other_seeds(seed: int) -> None:
    counts = simulate(seed, requests=120).counts
    assert min(counts["plans"], counts["finished"]) > 0, f"nothing was reused: {counts}"


def test_20_21_22_23_27_nothing_goes_wrong_under_faults() -> None:
    seen: Counter[str] = Counter()
    for seed in AT_PUSH:
        seen += simulate(seed, requests=120).counts
    # A run that reuses nothing, or meets no fault, would prove nothing.
    for what in (
        "plans",
        "preemptions",
        "finished",
        "exact tokens",
        "kept tokens",
        "restored tokens",
        "stored blocks",
        "spread plans",
        "chosen by workers",
        "drifts",
        "in full",
        "similar tokens",
        "accepted segments",
        "rejected tokens",
        "explained: edit",
        "segreuse-heal",
        *(f"policy: {policy}" for policy in POLICIES),
        *(f"fault: {site}" for site in (*SITES, *OTHERS)),
    ):
        assert seen[what] > 0, f"no {what} in {seen}"
    assert seen["plans"] > 0.1 * seen["requests"], f"hardly any reuse: {seen}"


def test_reused_kv_carries_nothing_that_is_not_in_front_of_it_where_that_was_asked_for() -> None:
    seen = sum((simulate(seed, 60, same_context=0.6).counts for seed in (0, 1)), Counter[str]())
    assert seen["tokens in their context"] > 0, f"nothing was reused: {seen}"


def test_a_seed_replays() -> None:
    first, again = (simulate(7, requests=60) for _ in range(2))
    assert first == again
    assert simulate(8, requests=60).digest != first.digest


def test_a_failing_seed_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, thorough: bool = True) -> None:
        raise AssertionError("two and two are five")

    monkeypatch.setattr(simulation.World, "check", wrong)
    with pytest.raises(SimulationError, match="two and two are five") as failure:
        simulate(3, requests=20)
    assert "python -m tests.stateful.simulation --seed 3 --requests 20" in str(failure.value)
