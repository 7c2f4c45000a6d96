# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict is that of start-up: of refused models, and of some that are served. Of all
others that are served `test_equality.py` compares it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench.shapes import REFUSED, VISION, make_model
from tests.e2e.engine import diagnosed, engine
from tests.e2e.test_vision import STAND_INS
from vllm_segreuse import worker
from vllm_segreuse.prefill.checks import Runtime, prove


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*REFUSED, "llama", "qwen3_moe", "gemma3"])
def test_the_doctor_says_what_start_up_says(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[Runtime] = []

    def proving(*args: Any) -> Runtime:
        proven.append(prove(*args))
        return proven[0]

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


@pytest.mark.slow
@pytest.mark.parametrize("shape", VISION)
def test_a_vision_model_works_for_the_doctor_as_it_does_for_start_up(shape: str) -> None:
    """`test_vision.py` starts it."""
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "vllm_segreuse.cli",
        "doctor",
        str(make_model(shape)),
        "--json",
    ]
    environment = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout)["notes"] == []
