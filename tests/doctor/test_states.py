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

UNKNOWN = {
    "qwen3": (),
    "lfm2": (
        "no trained model with short convolutions was studied, so what its answers are worth "
        "behind composed states is not known",
    ),
}
"""By the beginning of a family's name; others are of Mamba-2."""
OF_MAMBA2 = (
    "no trained model of Mamba-2 was studied, so what its answers are worth behind composed states "
    "is not known",
)
ASKED: dict[str, Any] = {
    "disable_hybrid_kv_cache_manager": False,
    "enforce_eager": True,
    "mamba_ssm_cache_dtype": "float32",  # as by itself where the CPU computes bfloat16
}


def found(folder: Path, name: str, arguments: dict[str, Any], policy: str) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]["config"]))
    options = SegReuseConfig.from_options({"policy": policy})
    return diagnose(EngineArgs(model=str(folder), **arguments), options)


AT_PUSH = "qwen3-next-80b-a3b", "granite-4.0-h-tiny", "lfm2-1.2b"
WITH_MAPS = [
    name if name in AT_PUSH else pytest.param(name, marks=pytest.mark.slow)
    for name, family in FAMILIES.items()
    if "map_bytes" in family
]


@pytest.mark.parametrize("name", WITH_MAPS)
def test_models_whose_states_are_composed_work_where_it_was_asked_for(
    name: str, tmp_path: Path
) -> None:
    said = found(tmp_path, name, ASKED, "auto")
    assert said.works, said.reasons
    assert any("start-up proves on the loaded model" in note for note in said.notes)
    assert said.states is not None
    assert said.states.map_bytes == FAMILIES[name]["map_bytes"]
    assert said.states.most_maps == 2**30 // said.states.map_bytes
    kind = name[:5] if name.startswith("qwen3") else name[:4]
    assert said.states.unknown == UNKNOWN.get(kind, OF_MAMBA2)


def test_a_policy_that_composes_works_as_the_default_does(tmp_path: Path) -> None:
    said = found(tmp_path, "qwen3-next-80b-a3b", ASKED, "shift")
    assert said.works, said.reasons


def test_no_room_for_one_map_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["granite-4.0-h-tiny"]["config"]))
    options = SegReuseConfig.from_options({"state_bytes": 10**6})
    said = diagnose(EngineArgs(model=str(tmp_path), **ASKED), options)
    assert not said.works
    assert "state_bytes=1000000 holds nothing" in said.reasons[0]


def test_experts_without_a_gate_are_nothing_that_vllm_computes_on_cpus(tmp_path: Path) -> None:
    """Those of Nemotron 3 Nano; its states would be composed."""
    said = found(tmp_path, "nemotron-3-nano-30b", ASKED, "auto")
    [reason] = said.reasons
    assert reason.startswith("vLLM itself refuses: ")


@pytest.mark.parametrize("name", ["jamba-1.5-mini", "mamba2-2.7b"])
def test_other_states_are_refused_also_where_it_was_asked_for(name: str, tmp_path: Path) -> None:
    """Of Mamba, and of Mamba-2 without attention."""
    said = found(tmp_path, name, ASKED, "auto")
    assert not said.works
    assert FAMILIES[name]["why"] in said.reasons[0]


@pytest.mark.parametrize(
    ("arguments", "policy", "way_out"),
    [
        ({}, "shift", "--no-disable-hybrid-kv-cache-manager has states of such layers composed"),
        (ASKED, "prophet", "write policy: focus into --segreuse-config"),
        (ASKED | {"enforce_eager": False}, "shift", "add --enforce-eager"),
        (ASKED | {"mamba_ssm_cache_dtype": "bfloat16"}, "shift", "--mamba-ssm-cache-dtype float32"),
    ],
)
def test_else_it_says_what_is_missing(
    arguments: dict[str, Any], policy: str, way_out: str, tmp_path: Path
) -> None:
    said = found(tmp_path, "qwen3-next-80b-a3b", arguments, policy)
    assert not said.works
    assert any(way_out in reason for reason in said.reasons)


@WITHOUT_TORCHVISION
@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "qwen3.6-like", "lfm2-vl-1.6b"])
def test_where_the_code_for_images_is_not_there_that_alone_is_missing(
    name: str, tmp_path: Path
) -> None:
    said = found(tmp_path, name, ASKED, "auto")
    assert said.reasons == (
        f"vLLM cannot load {said.architectures[0]} here: No module named 'torchvision'; install it",
    )
    [refused, _] = found(tmp_path, name, {}, "auto").reasons
    assert "--no-disable-hybrid-kv-cache-manager has states of such layers composed" in refused
