# SPDX-License-Identifier: Apache-2.0
"""What `peaks` finds on the lab's second model: it may not get worse."""

from collections.abc import Iterator
from statistics import fmean

import pytest

from bench.harness import REPOSITORY
from bench.quality.engine import FULL, Arm, Lab, lab_engine
from bench.quality.tasks import example
from bench.suites import quality
from tests.e2e.engine import quick_start
from vllm_segreuse.policies import peaks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow("another model of the lab", instead="e2e/test_lab e2e/test_policies"),
]

SHIFT = Arm("shift", {"policy": "shift"})
PEAKS = Arm("peaks", {"policy": "peaks", "recompute_ratio": 0.1})
FEW_PEAKS = Arm("few by peaks", {"policy": "peaks", "recompute_ratio": 0.005})
FEW_SUMS = Arm("few by sums", {"policy": "prophet", "recompute_ratio": 0.005})

# Of the tuning examples: questions for four variables that rest on several lookups, and facts that
# changed where no head pays the later statement a fifth of its attention.
SEVERAL_LOOKUPS = (2, 3, 4, 5, 6, 10)
WEAK_LOOKUPS = (7, 36, 41, 51)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with quick_start(), lab_engine(REPOSITORY / "models" / "seed0") as started:
        yield started


def mean_scores(lab: Lab, task: str, numbers: tuple[int, ...], *arms: Arm) -> dict[str, float]:
    asked = [lab.ask(example(**quality.draw("tuning", task, n)), [*arms]) for n in numbers]
    return {arm.name: fmean(outcomes[arm.name].score for outcomes in asked) for arm in arms}


def test_peaks_find_with_ten_tokens_what_sums_do_not(lab: Lab) -> None:
    """Were `peaks` to sum, to take the least attended, or to compute fewer, it would not."""
    scores = mean_scores(lab, "mq-vt", SEVERAL_LOOKUPS, FULL, FEW_PEAKS, FEW_SUMS, SHIFT)
    assert scores["full"] == 1
    assert scores["few by peaks"] >= 0.95  # one word of 24
    assert scores["few by sums"] <= 0.85
    assert scores["shift"] <= 0.6


def test_a_twentieth_of_a_head_is_enough_to_be_computed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a higher threshold `peaks` leaves facts as they were that no one head looks up."""
    assert mean_scores(lab, "chat memory", WEAK_LOOKUPS, PEAKS)["peaks"] >= 0.75
    monkeypatch.setattr(peaks, "LEAST_SHARE", 0.2)
    assert mean_scores(lab, "chat memory", WEAK_LOOKUPS, PEAKS)["peaks"] <= 0.25
