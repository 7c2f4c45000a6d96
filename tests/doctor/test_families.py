# SPDX-License-Identifier: Apache-2.0
"""Models that people serve: the doctor's verdict on their `config.json` of real size.

`families.json` has, by name, the configuration, whether it works, and a part of the reason if not.
`code` is what vLLM finds out about a model's code, where that cannot be imported without packages
that the tests do without (torchvision); `text` is whether its layers for text are examined without
that code. `amx` is whether the machine is to have it; `environment` and `options` are variables
and options of the server that it needs; `layers` is whether the layers are supported, and it is
vLLM that refuses the model. `map_bytes` are those of what a segment changes of its states, where
these are composed if it is asked for (`test_states.py`).
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor import diagnosis, looking
from segreuse_tools.doctor.diagnosis import Diagnosis
from segreuse_tools.doctor.examination import UnexaminedError
from tests.latent import BLOCK_SIZE, prefix_cache_for_latents
from vllm_segreuse.config import SegReuseConfig

FAMILIES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "families.json").read_text()
)


AT_PUSH = (
    *("llama-3.1-8b", "phi-3-mini-128k", "gemma-3-27b", "gemma-4-e2b", "gpt-oss-20b"),
    *("glm-4.5-air", "qwen2.5-vl-7b", "olmo-2-7b", "hunyuan-a13b", "apertus-8b"),
)
"""Of those that work; those that do not are examined at every push."""


def _or_slow(name: str) -> Any:
    is_slow = FAMILIES[name]["works"] and name not in AT_PUSH
    return pytest.param(name, marks=pytest.mark.slow) if is_slow else name


def stand_in(code: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM believe that it has looked at the code, of which no layers can be built."""

    def unexamined(vllm_config: Any) -> None:
        raise UnexaminedError("no code")

    known: Any = ModelRegistry.models["LlamaForCausalLM"]
    info = dataclasses.replace(known.inspect_model_cls(), **code)
    monkeypatch.setattr(type(known), "inspect_model_cls", lambda self: info)
    monkeypatch.setattr(looking, "_check_code", lambda config, trusted: None)
    monkeypatch.setattr(looking, "examine", unexamined)


def found(config: dict[str, Any], folder: Path, **options: Any) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(config))
    return diagnosis.diagnose(EngineArgs(model=str(folder), **options), SegReuseConfig())


@pytest.mark.parametrize("name", [_or_slow(name) for name in FAMILIES])
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
    told = found(family["config"], tmp_path, **family.get("options", {}))
    assert told.works == family["works"], told.reasons
    assert told.architectures == tuple(family["config"]["architectures"])
    if told.works:
        assert told.reasons == ()
        if "code" not in family:
            assert not any("start-up only" in note for note in told.notes)
            assert told.memory is not None
            assert told.memory.kv_bytes_per_token == KV_BYTES[name]
    else:
        assert family["why"] in told.reasons[0]
        assert all(
            reason.count(". ") == 0 for reason in told.reasons if "vLLM itself" not in reason
        )
        if family.get("layers"):
            assert told.notes[0].startswith("segment reuse works with the model's layers")
            assert told.memory is not None
            assert told.memory.kv_bytes_per_token == KV_BYTES[name]


def in_bf16(layers: int, kv_heads: int, channels: int) -> int:
    """Bytes of a token's keys and values at so many layers."""
    return layers * 2 * kv_heads * channels * 2


KV_BYTES = {
    "llama-3.1-8b": in_bf16(32, 8, 128),
    "llama-3.2-1b": in_bf16(16, 8, 64),
    "llama-3.3-70b": in_bf16(80, 8, 128),
    "qwen2.5-7b": in_bf16(28, 4, 128),
    "qwen3-8b": in_bf16(36, 8, 128),
    "qwen3-30b-a3b": in_bf16(48, 4, 128),
    "qwen3-coder-480b": in_bf16(62, 8, 128),
    "mistral-7b-v0.3": in_bf16(32, 8, 128),
    "mixtral-8x7b": in_bf16(32, 8, 128),
    "ministral-3-8b": in_bf16(34, 8, 128),
    "phi-3-mini-128k": in_bf16(32, 32, 96),
    "phi-4": in_bf16(40, 10, 128),
    "gemma-2-9b": in_bf16(42, 8, 256),
    "gemma-3-1b": in_bf16(26, 1, 256),
    "gemma-3-27b": in_bf16(62, 16, 128),
    # Windows, and all tokens, of which keys and values of fewer, wider heads are kept.
    "gemma-4-26b-a4b": in_bf16(25, 8, 256) + in_bf16(5, 2, 512),
    # Of the others: more than half of E2B's layers share these.
    "gemma-4-e2b": in_bf16(12, 1, 256) + in_bf16(3, 1, 512),
    "gemma-4-e4b": in_bf16(20, 2, 256) + in_bf16(4, 2, 512),
    "gemma-4-31b": in_bf16(50, 16, 256) + in_bf16(10, 4, 512),
    "gpt-oss-20b": in_bf16(24, 8, 64),
    "command-r7b": in_bf16(32, 8, 128),
    "command-r": in_bf16(40, 64, 128),
    "glm-4-9b": in_bf16(40, 2, 128),
    "glm-4.5-air": in_bf16(46, 8, 128),
    "glm-4.6 and 4.7": in_bf16(92, 8, 128),
    "ernie-4.5-0.3b": in_bf16(18, 2, 128),
    "olmo-2-7b": in_bf16(32, 32, 128),
    "olmo-3-7b": in_bf16(32, 32, 128),
    "granite-3.3-8b": in_bf16(40, 8, 128),
    "llama-4-scout": in_bf16(48, 8, 128),
    "minimax-m2.5": in_bf16(62, 8, 128),
    "hy3": in_bf16(80, 8, 128),
    "exaone-4.5-33b": in_bf16(64, 8, 128),
    "step-3.5-flash": in_bf16(45, 8, 128),
    "hunyuan-a13b": in_bf16(32, 8, 128),
    "apertus-8b": in_bf16(32, 8, 128),
    "mimo-7b": in_bf16(36, 8, 128),
    "minicpm-2b": in_bf16(40, 36, 64),
    "qwen2.5-vl-7b": in_bf16(28, 4, 128),
    "qwen3-vl-8b": in_bf16(36, 8, 128),
    "qwen3-vl-4b": in_bf16(36, 8, 128),
    "qwen3-vl-30b-a3b": in_bf16(48, 4, 128),
    "glm-4.5v": in_bf16(46, 8, 128),
    "granite-4.0-micro": in_bf16(40, 8, 64),
    "seed-oss-36b": in_bf16(64, 8, 128),
    "smollm3-3b": in_bf16(36, 4, 128),
    "exaone-4.0-32b": in_bf16(64, 8, 128),
    "k-exaone-236b": in_bf16(48, 8, 128),
    "ernie-4.5-21b-a3b": in_bf16(28, 4, 128),
}
"""By the published shapes: layers, KV heads and channels of a head."""


WITHOUT_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is here"
)


@WITHOUT_TORCHVISION
@pytest.mark.parametrize("name", [name for name, it in FAMILIES.items() if it.get("text")])
def test_layers_for_text_are_examined_where_the_code_for_images_is_not_there(
    name: str, tmp_path: Path
) -> None:
    told = found(FAMILIES[name]["config"], tmp_path)
    assert not told.works
    assert told.reasons[0].startswith(f"vLLM cannot load {told.architectures[0]} here: No module")
    assert len(told.reasons) == 1
    assert told.notes == (
        "segment reuse works with the model's layers, examined as a model of text alone",
    )
    assert told.memory is not None
    assert told.memory.kv_bytes_per_token == KV_BYTES[name]


@WITHOUT_TORCHVISION
def test_layers_that_the_file_alone_tells_of_are_refused_without_any_code(tmp_path: Path) -> None:
    told = found(FAMILIES["qwen3.5-35b-a3b"]["config"], tmp_path)
    assert "hand on a state in place of keys and values" in told.reasons[0]
    assert "No module named 'torchvision'; install it" in told.reasons[1]


def test_what_vllm_refuses_by_itself_is_told_beside_our_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has no prefix cache here for latent attention, and wants one for the other layers."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    told = found(FAMILIES["kimi-k3"]["config"], tmp_path)
    assert len(told.reasons) == 2
    assert "hand on a state" in told.reasons[0]
    assert told.reasons[1].startswith("vLLM itself refuses: ")


QUANTISED: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}


@pytest.mark.parametrize(
    ("name", "why", "works"),
    [
        ("qwen3-8b", "Failed to find a kernel", True),
        ("mistral-7b-v0.1", "every layer of the model attends to a sliding window", False),
        ("gpt2-xl", "no positions", False),
    ],
)
def test_a_kernel_that_vllm_lacks_hides_nothing_of_the_layers(
    name: str,
    why: str,
    works: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    told = found(FAMILIES[name]["config"] | QUANTISED, tmp_path)
    assert not told.works
    assert why in told.reasons[0]
    assert told.notes == (
        (
            "segment reuse works with the model's layers, examined without quantisation (weights "
            "are counted so)",
        )
        if works
        else ()
    )
    assert (told.memory is not None) == works


LATENT = ("deepseek-v2-lite", "deepseek-v3", "kimi-k2", "kimi-k2.5", "glm-4.7-flash")


@pytest.mark.parametrize("name", LATENT)
def test_latent_models_work_where_vllm_has_a_prefix_cache(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]["config"]
    with prefix_cache_for_latents():
        told = found(config, tmp_path, block_size=BLOCK_SIZE)
    assert (told.works, told.reasons) == (True, ())
    assert not any("start-up only" in note for note in told.notes)
    assert told.kernels is not None
    assert "latent KV of 576 channels" in told.kernels
    assert told.memory is not None
    # One vector per layer, in bf16.
    layers = config.get("text_config", config)["num_hidden_layers"]
    assert told.memory.kv_bytes_per_token == layers * 576 * 2


def test_there_is_a_family_for_every_reason_and_enough_of_them() -> None:
    assert all(FAMILIES[name]["works"] for name in AT_PUSH)
    assert len(FAMILIES) >= 25
    assert sum(family["works"] for family in FAMILIES.values()) >= 10


def test_code_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: object) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(type(ModelRegistry.models["LlamaForCausalLM"]), "load_model_cls", missing)
    told = found(FAMILIES["llama-3.1-8b"]["config"], tmp_path)
    assert told.reasons == (
        "vLLM cannot load LlamaForCausalLM here: No module named 'torchvision'; install it",
    )
