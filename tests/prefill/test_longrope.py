# SPDX-License-Identifier: Apache-2.0
"""Keys whose rotary module is none of those known; beside no other model in this process."""

from typing import Any

import pytest

from tests.prefill.loaded import HEAD_SIZE, POSITIONS, loaded, refusal
from vllm_segreuse.model import rotary
from vllm_segreuse.prefill import checks
from vllm_segreuse.prefill.proofs import rotations


@pytest.mark.parametrize("threshold", [POSITIONS // 4, POSITIONS], ids=["long", "short"])
def test_positions_that_no_rotary_module_explains_are_refused(
    threshold: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE, where it is known, and where it is not."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * (HEAD_SIZE // 2),
        "long_factor": [1.0 + i / 2 for i in range(HEAD_SIZE // 2)],
        "original_max_position_embeddings": threshold,
    }
    changes = {"rope_parameters": longrope, "original_max_position_embeddings": threshold}
    with loaded(tmp_path, **changes) as model:
        checks.prove(model.model, model.vllm_config, model.kv_cache_config)
        monkeypatch.setattr(rotations, "MODULES", rotary.MODULES[:1])
        assert "carries positions that no rotary module explains" in refusal(model)
