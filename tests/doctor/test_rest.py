# SPDX-License-Identifier: Apache-2.0
"""What the doctor leaves out of a model that vLLM cannot serve here, to look at its layers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.doctor.diagnosis import Diagnosis, diagnose
from segreuse_tools.doctor.rest import rest_of
from tests.doctor.test_families import FAMILIES, WITHOUT_TORCHVISION, in_bf16
from vllm_segreuse.config import SegReuseConfig


def found(folder: Path, config: dict[str, Any], **options: Any) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(config))
    return diagnose(EngineArgs(model=str(folder), **options), SegReuseConfig())


def test_quantisation_that_another_file_tells_of_is_left_out(tmp_path: Path) -> None:
    """As ModelOpt writes it: `config.json` is that of the unquantised model."""
    about = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    quantised = {"producer": {"name": "modelopt"}, "quantization": about}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantised))
    told = found(tmp_path, FAMILIES["qwen3-8b"]["config"])
    assert "NVFP4" in told.reasons[0]
    assert told.notes == (
        "segment reuse works with the model's layers, examined without quantisation (weights are "
        "counted so)",
    )
    assert told.memory is not None
    assert told.memory.kv_bytes_per_token == in_bf16(36, 8, 128)


def test_code_of_the_models_own_is_left_out_and_nothing_of_it_stays(tmp_path: Path) -> None:
    config = FAMILIES["minicpm-2b"]["config"]
    told = found(tmp_path, config)
    assert "add --trust-remote-code" in told.reasons[0]
    assert told.notes == (
        "segment reuse works with the model's layers, examined without the model's own code",
    )
    assert config["model_type"] not in CONFIG_MAPPING


def test_a_class_of_the_models_own_that_was_asked_for_and_is_not_there(tmp_path: Path) -> None:
    told = found(tmp_path, FAMILIES["minicpm-2b"]["config"], trust_remote_code=True)
    assert "does not appear to have a file named configuration_minicpm.py" in told.reasons[0]
    assert told.memory is not None


def test_what_segment_reuse_refuses_comes_before_the_code(tmp_path: Path) -> None:
    """A window on every layer, of a model whose class vLLM does not have."""
    config = FAMILIES["minicpm-2b"]["config"] | {"sliding_window": 512}
    ours, of_vllm = found(tmp_path, config).reasons
    assert "every layer of the model attends to a sliding window" in ours
    assert "add --trust-remote-code" in of_vllm


@pytest.mark.parametrize(
    ("name", "architecture", "layers"),
    [
        ("qwen2.5-vl-7b", "Qwen2ForCausalLM", 28),
        ("qwen3-vl-4b", "Qwen3ForCausalLM", 36),
        ("qwen3-vl-30b-a3b", "Qwen3MoeForCausalLM", 48),
        ("glm-4.5v", "Glm4MoeForCausalLM", 46),
        ("gemma-3-27b", "Gemma3ForCausalLM", 62),
    ],
)
def test_layers_for_text_have_plain_positions(
    name: str, architecture: str, layers: int, tmp_path: Path
) -> None:
    """Qwen2.5-VL says it beside what it says of images, the others in a part of its own."""
    config = FAMILIES[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rest = rest_of(config, tmp_path)
    assert rest is not None
    assert rest.without == "as a model of text alone"
    assert rest.config["architectures"] == [architecture]
    assert rest.config["num_hidden_layers"] == layers
    assert "mrope" not in json.dumps(rest.config)


def test_nothing_is_left_out_of_a_plain_model(tmp_path: Path) -> None:
    config = FAMILIES["llama-3.1-8b"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert rest_of(config, tmp_path) is None


@WITHOUT_TORCHVISION
def test_kinds_of_layers_may_be_the_class_s_to_say(tmp_path: Path) -> None:
    config = FAMILIES["qwen3.5-35b-a3b"]["config"]
    text = {key: it for key, it in config["text_config"].items() if key != "layer_types"}
    ours, of_vllm = found(tmp_path, config | {"text_config": text}).reasons
    assert "hand on a state in place of keys and values" in ours
    assert "torchvision" in of_vllm


def test_images_of_a_model_that_vllm_has_no_code_for(tmp_path: Path) -> None:
    """vLLM asks for the files of its images first."""
    ours, of_vllm = found(tmp_path, FAMILIES["aya-vision-8b"]["config"]).reasons
    assert ours == (
        "vLLM runs AyaVisionForConditionalGeneration by its Transformers backend, and its images "
        "are not proven; serve this model without --segreuse"
    )
    assert of_vllm.startswith("vLLM itself refuses: ")
