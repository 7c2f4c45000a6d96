# SPDX-License-Identifier: Apache-2.0
"""Documents come and go in a nearly full pool: nothing leaks, nothing fails, reuse stays."""

import pytest

from tests.stateful.churn import USAGE, churn


@pytest.mark.parametrize("spread", [False, True], ids=["at once", "spread"])
def test_23_a_full_pool_stays_in_its_steady_state(spread: bool) -> None:
    outcome = churn(200, spread=spread)
    assert outcome.failed == 0
    assert (outcome.spread_plans > 50) is spread
    assert outcome.usage >= USAGE - 0.01
    assert outcome.first > 0.5
    assert outcome.last >= 0.95 * outcome.first
