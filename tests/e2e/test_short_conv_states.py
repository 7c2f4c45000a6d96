# SPDX-License-Identifier: Apache-2.0
"""Short convolutions (LFM2): their last inputs are handed on as states of Qwen3-Next are, whose
tests run once more on shapes of these, in processes of their own."""

from __future__ import annotations

import pytest

from tests.e2e.test_qwen3_5_states import check_verdict, run, run_tests


@pytest.mark.slow("experts, and all tests of each shape", instead="e2e/test_composed_kinds")
@pytest.mark.timeout(1800)
@pytest.mark.shows("states")
@pytest.mark.parametrize("shape", ["lfm2", "lfm2_moe"])
def test_what_holds_of_qwen3_next_holds_of_short_convolutions(shape: str) -> None:
    run_tests(shape)


@pytest.mark.slow("inside a model that takes images", instead="e2e/test_composed_kinds")
@pytest.mark.timeout(1800)
def test_text_is_composed_where_a_model_would_take_images() -> None:
    run("lfm2_vl", "tests.e2e.test_short_conv_states")
    run_tests("lfm2_vl")


if __name__ == "__main__":
    check_verdict("lfm2_vl")
