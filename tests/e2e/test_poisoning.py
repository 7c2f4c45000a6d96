# SPDX-License-Identifier: Apache-2.0
"""The short profile of `tests.e2e.poisoning`."""

import pytest

from tests.e2e import poisoning


@pytest.mark.parametrize(
    "similar",
    [
        pytest.param(
            False,
            marks=pytest.mark.slow(
                "without similar segments", instead="e2e/test_poisoning e2e/test_exactness"
            ),
            id="equal",
        ),
        pytest.param(True, id="equal and similar"),
    ],
)
def test_29_plain_twins_of_approximate_requests_are_bit_identical(similar: bool) -> None:
    expected = poisoning.references(100, similar)
    with poisoning.small_engine(segreuse=True, similar=similar) as running:
        counts = poisoning.poison(running, expected, similar=similar)
    assert (counts["similar"] > 10) is similar, counts
    assert (counts["entering"] > 2) is similar, counts
    assert (min(counts["accepted"], counts["rejected"]) > 0) is similar, counts
    assert counts["twins"] > (10 if similar else 20), counts
    for pressure in ("preempted", "chunked", "together", "spread", "aborted"):
        assert counts[pressure] > 0, counts
