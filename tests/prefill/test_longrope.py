# SPDX-License-Identifier: Apache-2.0
"""A model whose keys no rotation by the position explains; beside no other in this process."""

from typing import Any

from tests.prefill.loaded import HEAD_SIZE, loaded, refusal


def test_positions_that_no_rotary_module_explains_are_refused(tmp_path: Any) -> None:
    """LongRoPE chooses its angles by the length of the prompt."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * (HEAD_SIZE // 2),
        "long_factor": [4.0] * (HEAD_SIZE // 2),
        "original_max_position_embeddings": 128,
    }
    changes = {"rope_parameters": longrope, "original_max_position_embeddings": 128}
    with loaded(tmp_path, **changes) as model:
        assert "carries positions that no rotary module explains" in refusal(model)
