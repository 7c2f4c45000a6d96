# SPDX-License-Identifier: Apache-2.0
"""The doctor knows what start-up refuses beside pipeline stages."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor.diagnosis import Diagnosis, diagnose
from tests.doctor.test_families import FAMILIES
from vllm_segreuse.config import SegReuseConfig


def diagnosed(folder: Path, **changes: Any) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(FAMILIES["llama-3.1-8b"]["config"]))
    args = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=4096,
        block_size=32,
        pipeline_parallel_size=2,
    )
    return diagnose(args, SegReuseConfig.from_options(changes))


def test_the_doctor_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    [reason] = diagnosed(tmp_path, policy="sparsex", dense_layers=20).reasons
    assert "policy: sparsex needs 20 to choose tokens (dense_layers: 20); set policy to" in reason
    found = diagnosed(tmp_path)
    assert found.reasons == ()
    assert found.works
