# SPDX-License-Identifier: Apache-2.0
"""Documents come and go in a nearly full pool: nothing leaks, nothing fails, reuse stays."""

from tests.model.churn import USAGE, churn


def test_23_a_full_pool_stays_in_its_steady_state() -> None:
    outcome = churn(300)
    assert outcome.failed == 0
    assert outcome.usage >= USAGE - 0.01
    assert outcome.first > 0.5
    assert outcome.last >= 0.95 * outcome.first
