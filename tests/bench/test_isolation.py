# SPDX-License-Identifier: Apache-2.0
"""The figures of `bench isolation`, on times that are made up."""

import random
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench import engine
from bench.harness import BenchError
from bench.suites import isolation


def test_auc_counts_pairs_and_half_of_ties() -> None:
    assert isolation.auc([3, 4], [1, 2]) == 1
    assert isolation.auc([1, 2], [3, 4]) == 0
    assert isolation.auc([1, 3], [2, 3]) == (0 + 0 + 1 + 0.5) / 4


def test_intervals_cover_the_area_as_often_as_they_say() -> None:
    draw = np.random.default_rng(1)
    for shift in (0.0, 0.5, 3.0):
        truth = float(stats.norm.cdf(shift / 2**0.5))
        held = 0
        for _ in range(200):
            slow, fast = draw.normal(shift, 1, 60), draw.normal(0, 1, 60)
            low, high = isolation.interval(isolation.auc(slow.tolist(), fast.tolist()), 60, 60)
            held += low <= truth <= high
        assert held / 200 >= 0.93


def test_intervals_at_the_edges_have_a_width_and_narrow() -> None:
    low, high = isolation.interval(1.0, 40, 40)
    assert 0.85 < low < 0.99
    assert high == 1
    assert isolation.interval(0.0, 40, 40) == pytest.approx((0, 1 - low))
    assert isolation.interval(1.0, 400, 400)[0] > low
    low, high = isolation.interval(0.5, 750, 750)
    assert (low, high) == pytest.approx((0.4709, 0.5291), abs=1e-3)
    with pytest.raises(ValueError, match="no AUC of 0 and 3 values"):
        isolation.interval(0.5, 0, 3)


def found(low: float, high: float, control: float = 0.95) -> dict[str, float]:
    return {"auc_low": low, "auc_high": high, "control_low": control, "probes": 900}


@pytest.mark.parametrize(
    ("figures", "others", "said"),
    [
        (found(0.47, 0.53), 0.02, "within 0.05 of 0.5"),
        (found(0.44, 0.52), 0.02, "open: 900 probes are too few"),
        (found(0.48, 0.56), 0.02, "open"),
        (found(0.52, 0.56), 0.02, "time tells"),
        (found(0.43, 0.48), 0.02, "time tells"),
        (found(0.47, 0.53, control=0.8), 0.02, "none: the control's AUC may be 0.80"),
        (found(0.47, 0.53), 0.5, "none: others used 0.50 cores"),
    ],
)
def test_a_verdict_needs_margin_control_and_quiet(
    figures: dict[str, float], others: float, said: str
) -> None:
    assert isolation.verdict(figures, others).startswith(said)
    assert isolation.MARGIN == 0.05, "fixed before measuring"


def test_what_others_compute_is_told_from_what_we_do() -> None:
    before = isolation.Used(clock=100.0, all=50.0, own=7.0)
    after = isolation.Used(clock=110.0, all=63.0, own=15.0)
    assert after.others_since(before) == pytest.approx(0.5)
    start = isolation.Used.now()
    sum(range(3_000_000))
    end = isolation.Used.now()
    assert end.own > start.own
    assert end.clock > start.clock


def asked(monkeypatch: pytest.MonkeyPatch, leaks: bool) -> None:
    """An engine in which salts count, or do not."""
    known: set[tuple[Any, ...]] = set()

    def first_token(llm: Any, prompt: list[int], extra_args: Any, salt: Any) -> engine.Timed:
        who = extra_args["extra_keys"], None if leaks else salt
        text = tuple(prompt)
        found = any(
            w == who and " ".join(map(str, t)) in " ".join(map(str, text)) for w, *t in known
        )
        known.add((who, *text))
        return engine.Timed(1.0 if found else 2.0, 0, 5 if found else 0, None)

    monkeypatch.setattr(engine, "first_token", first_token)


def test_probes_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, leaks=False)
    for arm in isolation.ARMS:
        taken = isolation.probe(None, arm, 3, random.Random(0))
        assert taken == {"elsewhere": [2.0] * 3, "nowhere": [2.0] * 3, "own": [1.0] * 3}
        figures = isolation.figures(taken)
        assert figures["control_auc"] == figures["control_high"] == 1
        assert figures["auc"] == 0.5
        assert figures["auc_low"] < 0.5 < figures["auc_high"]
        assert figures["probes"] == 3


def test_a_leak_is_an_error_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, leaks=True)
    with pytest.raises(BenchError, match="cached elsewhere"):
        isolation.probe(None, isolation.ARMS[1], 3, random.Random(0))
