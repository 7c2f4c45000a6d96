# SPDX-License-Identifier: Apache-2.0
"""The lab's model with link tokens answers through the engine, and as plain torch does."""

from collections.abc import Iterator

import pytest

from bench.quality.isolated import Isolated, Reference, isolated_engine
from bench.suites import link


@pytest.fixture(scope="module", params=["link5"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Isolated, Reference]]:
    model = link.MODELS / request.param
    with isolated_engine(model, dtype="float32") as running:
        yield running, Reference(model)


def test_answers_are_right_and_exact(served: tuple[Isolated, Reference]) -> None:
    running, reference = served
    drawn = [one for one in link.draw_all("tuning", 4) if one.task != "vt"]
    found = running.ask(drawn)
    assert sum(one.score for one in found) / len(found) >= 0.8
    assert all(one.work < 0.5 and one.ttft_ms is None for one in found)
    [timed] = running.ask(drawn[:1], timed=True)
    assert timed.ttft_ms is not None
    assert max(running.difference(one, reference) for one in drawn[:3]) <= 0.002
