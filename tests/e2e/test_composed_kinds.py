# SPDX-License-Identifier: Apache-2.0
"""What shows most of Qwen3-Next's states holds of Mamba-2 and of short convolutions, too."""

import pytest

from tests.e2e.test_composed_states import (  # noqa: F401 - they run here once more
    _forgotten,
    test_maps_are_noted_over_several_steps,
    test_segments_where_they_were_read_answer_as_plain_vllm,
    test_single_tokens_are_computed_by_themselves,
    test_without_composing_it_would_answer_otherwise,
    world,
)

pytestmark = pytest.mark.patches("mamba_mixer2")


@pytest.fixture(scope="module", params=["granite_4_h", "lfm2"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)
