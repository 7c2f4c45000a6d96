# SPDX-License-Identifier: Apache-2.0
"""The doctor knows what start-up refuses beside a transfer connector."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor.diagnosis import Diagnosis, diagnose
from tests.doctor.conftest import alone  # noqa: F401 - a fixture
from tests.doctor.test_families import FAMILIES
from vllm_segreuse.config import SegReuseConfig


def diagnosed(folder: Path, **options: Any) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(FAMILIES["llama-3.1-8b"]["config"]))
    args = EngineArgs(model=str(folder), dtype="bfloat16", max_model_len=4096, block_size=32)
    return diagnose(args, SegReuseConfig.from_options(options))


def nixl(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role}


@pytest.mark.parametrize(
    ("role", "options"), [("kv_producer", {}), ("kv_consumer", {"spread_tokens": 0})]
)
def test_engines_of_a_fleet_work(role: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = diagnosed(tmp_path, beside=nixl(role), **options)
    assert found.reasons == ()
    assert found.works


def test_all_reasons_are_given(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, beside=nixl("kv_consumer"), tier={"host_gib": 1})
    assert not found.works
    assert len(found.reasons) == 2
    assert "remove tier" in found.reasons[0]
    assert "spread_tokens: 0" in found.reasons[1]


def test_a_class_that_cannot_be_hosted_is_a_reason(tmp_path: Path) -> None:
    beside = {"kv_connector": "C", "kv_connector_module_path": "nowhere", "name_free": True}
    found = diagnosed(tmp_path, beside=beside)
    assert "beside: C cannot be loaded" in found.reasons[0]
