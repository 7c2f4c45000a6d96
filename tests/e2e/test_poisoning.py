# SPDX-License-Identifier: Apache-2.0
"""The short profile of `tests.e2e.poisoning`."""

from tests.e2e import poisoning


def test_29_plain_twins_of_approximate_requests_are_bit_identical() -> None:
    expected = poisoning.references(60)
    with poisoning.small_engine(segreuse=True) as running:
        counts = poisoning.poison(running, expected)
    assert counts["twins"] > 20, counts
    for pressure in ("preempted", "chunked", "together", "spread", "aborted"):
        assert counts[pressure] > 0, counts
