# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict on models whose states are composed where it is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor.diagnosis import Diagnosis, diagnose
from tests.doctor.test_families import FAMILIES, WITHOUT_TORCHVISION
from vllm_segreuse.config import SegReuseConfig

ASKED: dict[str, Any] = {"disable_hybrid_kv_cache_manager": False, "enforce_eager": True}


def found(folder: Path, name: str, arguments: dict[str, Any], policy: str) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]["config"]))
    options = SegReuseConfig.from_options({"policy": policy})
    return diagnose(EngineArgs(model=str(folder), **arguments), options)


@pytest.mark.parametrize("policy", ["auto", "shift"])
def test_a_model_of_the_delta_rule_works_where_it_was_asked_for(
    policy: str, tmp_path: Path
) -> None:
    said = found(tmp_path, "qwen3-next-80b-a3b", ASKED, policy)
    assert said.works, said.reasons
    assert any("start-up proves on the loaded model" in note for note in said.notes)


@pytest.mark.parametrize(
    ("arguments", "policy", "way_out"),
    [
        ({}, "shift", "--no-disable-hybrid-kv-cache-manager has states of such layers composed"),
        (ASKED, "prophet", "write policy: focus into --segreuse-config"),
        (ASKED | {"enforce_eager": False}, "shift", "add --enforce-eager"),
    ],
)
def test_else_it_says_what_is_missing(
    arguments: dict[str, Any], policy: str, way_out: str, tmp_path: Path
) -> None:
    said = found(tmp_path, "qwen3-next-80b-a3b", arguments, policy)
    assert not said.works
    assert any(way_out in reason for reason in said.reasons)


@WITHOUT_TORCHVISION
@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "qwen3.6-like"])
def test_where_the_code_for_images_is_not_there_that_alone_is_missing(
    name: str, tmp_path: Path
) -> None:
    said = found(tmp_path, name, ASKED, "auto")
    assert said.reasons == (
        f"vLLM cannot load {said.architectures[0]} here: No module named 'torchvision'; install it",
    )
    [refused, _] = found(tmp_path, name, {}, "auto").reasons
    assert "--no-disable-hybrid-kv-cache-manager has states of such layers composed" in refused
