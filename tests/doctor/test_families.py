# SPDX-License-Identifier: Apache-2.0
"""Models that people serve: the doctor's verdict on their `config.json` of real size.

`families.json` has, by name, the configuration, whether it works, and a part of the reason if not.
`code` is what vLLM finds out about a model's code, where that cannot be imported without packages
that the tests do without (torchvision). `amx` is whether the machine is to have it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor import diagnosis
from segreuse_tools.doctor.examination import UnexaminedError
from tests.latent import BLOCK_SIZE, prefix_cache_for_latents
from vllm_segreuse.config import SegReuseConfig

FAMILIES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "families.json").read_text()
)


def stand_in(code: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM believe that it has looked at the code, of which no layers can be built."""

    def unexamined(vllm_config: Any) -> None:
        raise UnexaminedError("no code")

    known: Any = ModelRegistry.models["LlamaForCausalLM"]
    info = dataclasses.replace(known.inspect_model_cls(), **code)
    monkeypatch.setattr(type(known), "inspect_model_cls", lambda self: info)
    monkeypatch.setattr(diagnosis, "_check_code", lambda architectures: None)
    monkeypatch.setattr(diagnosis, "examine", unexamined)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_verdict_on_a_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    if "code" in family:
        stand_in(family["code"], monkeypatch)
    if "amx" in family:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: family["amx"])
    for variable, value in family.get("environment", {}).items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "config.json").write_text(json.dumps(family["config"]))
    found = diagnosis.diagnose(EngineArgs(model=str(tmp_path)), SegReuseConfig())
    assert found.works == family["works"], found.reasons
    assert found.architectures == tuple(family["config"]["architectures"])
    if found.works:
        assert found.reasons == ()
        if "code" not in family:
            assert not any("start-up only" in note for note in found.notes)
            assert found.memory is not None
    else:
        assert family["why"] in found.reasons[0]
        assert all(reason.count(". ") == 0 for reason in found.reasons), "one sentence each"


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_latent_models_work_where_vllm_has_a_prefix_cache(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with prefix_cache_for_latents():
        args = EngineArgs(model=str(tmp_path), block_size=BLOCK_SIZE)
        found = diagnosis.diagnose(args, SegReuseConfig())
    assert (found.works, found.reasons) == (True, ())
    assert not any("start-up only" in note for note in found.notes)
    assert found.kernels is not None
    assert "latent KV of 576 channels" in found.kernels
    assert found.memory is not None
    # One vector per layer, in bf16.
    assert found.memory.kv_bytes_per_token == config["num_hidden_layers"] * 576 * 2


def test_there_is_a_family_for_every_reason_and_enough_of_them() -> None:
    assert len(FAMILIES) >= 25
    assert sum(family["works"] for family in FAMILIES.values()) >= 10


def test_code_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: object) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'")

    config = FAMILIES["llama-3.1-8b"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(type(ModelRegistry.models["LlamaForCausalLM"]), "load_model_cls", missing)
    found = diagnosis.diagnose(EngineArgs(model=str(tmp_path)), SegReuseConfig())
    assert found.reasons == (
        "vLLM cannot load LlamaForCausalLM here: No module named 'torchvision'; install it",
    )
