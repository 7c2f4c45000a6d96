# SPDX-License-Identifier: Apache-2.0
"""Short convolutions (LFM2): their last inputs are handed on as states of Qwen3-Next are, whose
tests run once more on shapes of these, in processes of their own."""

from __future__ import annotations

import pytest

from bench.shapes import STATES_OF_CONVOLUTIONS
from tests.e2e.test_qwen3_5_states import run_tests


@pytest.mark.slow("experts, and all tests of each shape", instead="e2e/test_composed_kinds")
@pytest.mark.timeout(1800)
@pytest.mark.shows("states")
@pytest.mark.parametrize("shape", STATES_OF_CONVOLUTIONS)
def test_what_holds_of_qwen3_next_holds_of_short_convolutions(shape: str) -> None:
    run_tests(shape)
