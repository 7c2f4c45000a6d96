# SPDX-License-Identifier: Apache-2.0
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bench import shapes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_unknown_shape_names_the_known_ones(root: Path) -> None:
    with pytest.raises(KeyError, match=r"'llema'.*choose from llama,"):
        shapes.make_model("llema", root)


def test_a_model_is_made_once(root: Path) -> None:
    made = shapes.make_model("llama", root)
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert shapes.make_model("llama", root) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == written


def test_cache_directory_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SEGREUSE_CACHE", str(tmp_path))
    assert shapes.make_model("llama").is_relative_to(tmp_path)


def test_a_changed_recipe_is_another_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shapes.make_model("llama", root)
    monkeypatch.setattr(shapes, "RECIPE_VERSION", shapes.RECIPE_VERSION + 1)
    assert shapes.make_model("llama", root) != before


def test_weights_are_reproducible(root: Path, tmp_path: Path) -> None:
    one = load_file(shapes.make_model("qwen3_moe", root) / "model.safetensors")
    two = load_file(shapes.make_model("qwen3_moe", tmp_path) / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16}


def test_several_at_once_make_one_and_leave_no_drafts(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: shapes.make_model("qwen2", tmp_path), range(4)))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [made.pop().name]
    assert not made
    assert torch.get_default_dtype() == torch.float32


def test_a_failed_attempt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(shapes, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        shapes.make_model("llama", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_tokenizer_is_real_and_lossless(root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shapes.make_model("llama", root))
    text = "def naïve(x):\n\treturn {'ключ': x}  # 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    _, passage = shapes.passages()[0]
    assert len(passage) / len(tokenizer(passage)["input_ids"]) > 3, "hardly any merges were learnt"


def test_chat_template_marks_turns(root: Path) -> None:
    directory = shapes.make_model("llama", root)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
    _, im_start, im_end = range(3)
    assert ids.count(im_start) == 2
    assert ids.count(im_end) == 1
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == im_end


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_every_shape_is_described(name: str) -> None:
    shape = shapes.SHAPES[name]
    assert shape.why
    text = shape.config.get("text_config", shape.config)
    assert text["num_attention_heads"] % text["num_key_value_heads"] == 0
