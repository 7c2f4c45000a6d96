# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict is that of start-up: of refused models, and of some that are served. Of all
others that are served `test_equality.py` and `test_vision.py` compare it."""

from typing import Any

import pytest
import torch

from bench.shapes import REFUSED
from tests.e2e.engine import diagnosed, engine
from vllm_segreuse.prefill import worker
from vllm_segreuse.prefill.checks import Runtime, prove


@pytest.mark.slow("more shapes", instead="e2e/test_equality e2e/test_startup doctor/test_families")
@pytest.mark.parametrize("shape", [*REFUSED, "deepseek_v3", "llama", "qwen3_moe", "gemma3"])
def test_the_doctor_says_what_start_up_says(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[Runtime] = []

    def proving(*args: Any) -> Runtime:
        proven.append(prove(*args))
        return proven[0]

    # Latent models are refused without it.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    found = diagnosed(shape)
    monkeypatch.setattr(worker, "prove", proving)
    why: tuple[str, ...] = ()
    try:
        with engine(shape):
            pass
    except RuntimeError as refusal:
        why = (str(refusal).removeprefix("segment reuse cannot start: "),)
    assert found.notes == ()
    assert found.reasons[:1] == why
    assert found.works == bool(proven)
    assert [found.kernels] == ([it.kernels for it in proven] or [None])
