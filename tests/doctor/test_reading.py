# SPDX-License-Identifier: Apache-2.0
"""Bad input is one sentence, before vLLM is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from segreuse_tools.model_folder import InputError, find_model, read_config
from tests.doctor import hub
from tests.doctor.test_families import FAMILIES

LLAMA: dict[str, Any] = FAMILIES["llama-3.1-8b"]["config"]


def folder(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_no_real_configuration_contradicts_itself(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(find_model(str(tmp_path))) == config


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["full_attention"] * 31}, "layer_types has 31 entries, num_hidden_layers is"),
    ({"layer_types": ["full_attention"] * 33}, "layer_types has 33 entries, num_hidden_layers is"),
    *(
        ({name: [1] * 31}, f"{name} has 31 entries, num_hidden_layers is 32")
        for name in (
            *("layers_block_type", "mlp_layer_types", "hybrid_layer_pattern"),
            *("no_rope_layers", "moe_layer_freq"),
        )
    ),
    (
        {"text_config": {"num_hidden_layers": 2, "layer_types": ["full_attention"]}},
        "layer_types has 1 entries, num_hidden_layers is 2",
    ),
    ({"num_key_value_heads": 5}, "num_attention_heads=32 is no multiple of num_key_value_heads=5"),
    ({"num_key_value_heads": 64}, "num_attention_heads=32 is no multiple of num_key_value_heads"),
    ({"hidden_size": 4097}, "hidden_size=4097 is no multiple of num_attention_heads=32, and there"),
    ({"head_dim": 0}, "head_dim is 0, not a positive number"),
    ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', not a positive number"),
    ({"num_attention_heads": -1}, "num_attention_heads is -1, not a positive number"),
    ({"vocab_size": True}, "vocab_size is True, not a positive number"),
    ({"text_config": {"hidden_size": 2.5}}, "hidden_size is 2.5, not a positive number"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, more than any model has"),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000, more than any model has"),
    ({"rope_theta": float("nan")}, "rope_theta is nan, not a number that angles can be made of"),
    ({"rope_theta": -1e4}, "rope_theta is -10000.0, not a number that angles can be made of"),
]


@pytest.mark.parametrize(("changes", "why"), CONTRADICTIONS)
def test_a_configuration_that_contradicts_itself(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        read_config(folder(tmp_path, **changes))
    start = f"{tmp_path / 'config.json'} contradicts itself: {why}"
    assert str(refused.value).startswith(start)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 4097, "head_dim": 128},
        {"num_key_value_heads": None, "head_dim": None},
        {"num_key_value_heads": [8] * 32},
        {"layer_types": ["full_attention"] * 32},
        {"layer_types": ["full_attention"] * 33, "num_nextn_predict_layers": 1},
        {"moe_layer_freq": 1, "no_rope_layers": []},
        {"rope_theta": [1e4] * 32, "max_position_embeddings": 10 * 2**20},
        {"kv_lora_rank": 512, "head_dim": 0},
        {"model_type": "qwen3", "hidden_size": 4097},  # whose heads have 128 channels by default
    ],
    ids=str,
)
def test_what_families_write_is_no_contradiction(changes: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(folder(tmp_path, **changes)) == LLAMA | changes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON: Expecting"),
        ("", "is not JSON: Expecting value"),
        ("[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit (4300 digits)"),
        ("[1]", "holds a list, not an object"),
        ("{}", "names no architecture: `architectures` is None"),
        ('{"architectures": []}', "names no architecture: `architectures` is []"),
        ('{"architectures": [7]}', "names no architecture: `architectures` is [7]"),
        ('{"architectures": [""]}', "names no architecture: `architectures` is ['']"),
    ],
)
def test_a_file_that_is_no_configuration(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError) as refused:
        read_config(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'} {why}")


def test_what_vllm_reads_in_place_of_the_file(tmp_path: Path) -> None:
    own = {"architectures": None, "text_config": {"num_hidden_layers": 2, "vocab_size": 9}}
    changed: dict[str, Any] = {"architectures": ["Some"], "text_config": {"num_hidden_layers": 3}}
    read = read_config(folder(tmp_path, **own), changed)
    assert read["architectures"] == ["Some"]
    assert read["text_config"] == {"num_hidden_layers": 3, "vocab_size": 9}
    with pytest.raises(InputError, match="num_attention_heads=32 is no multiple of"):
        read_config(folder(tmp_path), {"num_key_value_heads": 5})


def test_parts_that_are_not_of_text_have_sizes_of_their_own(tmp_path: Path) -> None:
    part = {"hidden_size": 1152, "num_attention_heads": 14}
    assert read_config(folder(tmp_path, vision_config=part))["vision_config"] == part
    with pytest.raises(InputError, match="hidden_size=1152 is no multiple of"):
        read_config(folder(tmp_path, text_config=part))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"config\.json is not JSON"):
        read_config(tmp_path)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^the folder \S+ has no config\.json$"):
        find_model(str(tmp_path))


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    file = folder(tmp_path) / "config.json"
    with pytest.raises(InputError, match="is a file: name the folder that holds"):
        find_model(str(file))


def test_a_model_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(InputError, match=r"^cannot read a+: File name too long$"):
        find_model("a" * 300)
    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(InputError, match=r"^cannot read /secret/model: Permission denied$"):
        find_model("/secret/model")


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "no/such/folder", "/no/such", "a b"])
def test_a_model_that_is_not_here(name: str) -> None:
    with pytest.raises(InputError) as refused:
        find_model(name)
    assert str(refused.value).startswith(f"{name} is neither a folder nor a model in the local")


def test_a_model_of_the_local_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub.fill(tmp_path, "some/model", {"main": LLAMA, "v2": LLAMA}, monkeypatch)
    assert found["main"] != found["v2"]
    assert find_model("some/model") == found["main"]
    assert find_model("some/model", "v2") == find_model("some/model", found["v2"].name)
    assert find_model("some/model", "v2") == found["v2"]


def test_a_model_may_be_cached_under_a_revision_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub.fill(tmp_path, "some/model", {"v2": LLAMA}, monkeypatch)
    assert find_model("some/model", "v2") == found["v2"]
    with pytest.raises(InputError, match=r"^some/model is neither a folder nor"):
        find_model("some/model")
    with pytest.raises(InputError, match=r"^some/model \(revision v3\) is neither a folder nor"):
        find_model("some/model", "v3")
