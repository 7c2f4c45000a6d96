# SPDX-License-Identifier: Apache-2.0
"""The lab's models trained for reuse answer through the engine, and as plain torch does."""

from collections.abc import Iterator

import pytest

from bench.quality.condensed import AnchorReference, Condensed
from bench.quality.isolated import Isolated, Reference, isolated_engine
from bench.suites import link
from tests.e2e.engine import quick_start

pytestmark = pytest.mark.slow(
    "the bundled models trained on documents",
    instead="e2e/test_isolated_documents e2e/test_anchors",
)


@pytest.fixture(scope="module", params=["link5", "anchors50"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Isolated, Reference]]:
    model = link.MODELS / request.param
    condensed = request.param in link.CONDENSED
    asker = Condensed if condensed else Isolated
    with quick_start(), isolated_engine(model, asker, dtype="float32") as running:
        yield running, (AnchorReference if condensed else Reference)(model)


def test_answers_are_right_and_exact(served: tuple[Isolated, Reference]) -> None:
    running, reference = served
    learnt = ["mq-niah"] if isinstance(running, Condensed) else link.TASKS[1:]
    drawn = [one for one in link.draw_all("tuning", 4) if one.task in learnt]
    found = running.ask(drawn)
    assert sum(one.score for one in found) / len(found) >= 0.8
    assert all(one.work < 0.5 and one.ttft_ms is None for one in found)
    [timed] = running.ask(drawn[:1], timed=True)
    assert timed.ttft_ms is not None
    assert max(running.difference(one, reference) for one in drawn[:3]) <= 0.002
    if isinstance(running, Condensed):
        assert 0.5 < running.documents.held_share < 0.6
