# SPDX-License-Identifier: Apache-2.0
"""Short convolutions (LFM2): their last inputs are handed on as states of Qwen3-Next are, whose
tests run once more on shapes of these, in processes of their own."""

from __future__ import annotations

import pytest

from bench.shapes import STATES_OF_CONVOLUTIONS
from tests.e2e.test_qwen3_5_states import run_tests

AT_PUSH = "segments_where", "without_composing", "single_tokens", "several_steps", "last_inputs"
"""Of the tests of Qwen3-Next, those that run at every push."""


@pytest.mark.timeout(900)
@pytest.mark.shows("states")
@pytest.mark.parametrize("shape", ["lfm2"])
def test_segments_are_composed_of_short_convolutions(shape: str) -> None:
    run_tests(shape, *AT_PUSH)


@pytest.mark.slow("experts, and all tests of each shape", instead="e2e/test_short_conv_states")
@pytest.mark.timeout(1800)
@pytest.mark.shows("states")
@pytest.mark.parametrize("shape", STATES_OF_CONVOLUTIONS)
def test_what_holds_of_qwen3_next_holds_of_short_convolutions(shape: str) -> None:
    run_tests(shape)
