# SPDX-License-Identifier: Apache-2.0
"""The figures of `bench isolation`, on times that are made up."""

import random
from typing import Any

import numpy as np
import pytest

from bench import engine
from bench.harness import BenchError
from bench.suites import isolation


def test_auc_counts_pairs_and_half_of_ties() -> None:
    assert isolation.auc([3, 4], [1, 2]) == 1
    assert isolation.auc([1, 2], [3, 4]) == 0
    assert isolation.auc([1, 3], [2, 3]) == (0 + 0 + 1 + 0.5) / 4


def test_the_interval_holds_a_half_if_nothing_differs_and_not_if_something_does() -> None:
    draw = np.random.default_rng(1)
    one, other = draw.normal(10, 1, 200), draw.normal(10, 1, 200)
    low, high = isolation.interval(one, other)
    assert low < 0.5 < high
    low, _ = isolation.interval(one + 0.5, other)
    assert low > 0.5


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
        assert isolation.figures(taken)["control_auc"] == 1


def test_a_leak_is_an_error_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, leaks=True)
    with pytest.raises(BenchError, match="cached elsewhere"):
        isolation.probe(None, isolation.ARMS[1], 3, random.Random(0))
