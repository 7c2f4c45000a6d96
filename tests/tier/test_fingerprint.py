# SPDX-License-Identifier: Apache-2.0
"""The fingerprint tells models apart whose KV differs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from bench.shapes import make_model
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.features.tier.fingerprint import (
    UnknownWeightsError,
    UnsafeNamesError,
    _folder,
    digest_of,
    model_fingerprint,
    sampled_weights,
    small_files,
)


def weights(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, by the format's own description."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    content = b"".join(tensor.tobytes() for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)


def tensors(count: int = 200) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"layer.{i}": rng.random((64, 48), dtype=np.float32) for i in range(count)}


def test_equal_weights_are_equal_anywhere(tmp_path: Path) -> None:
    weights(tmp_path / "a", tensors())
    weights(tmp_path / "b", tensors())
    assert sampled_weights(tmp_path / "a") == sampled_weights(tmp_path / "b") is not None


@pytest.mark.parametrize("changed", [0, 1, 77, 198, 199])
def test_one_tensor_that_changed_is_noticed(tmp_path: Path, changed: int) -> None:
    """As by an adapter that was merged: sizes and names are the same."""
    weights(tmp_path / "a", tensors())
    other = tensors()
    other[f"layer.{changed}"] += 1e-3
    weights(tmp_path / "b", other)
    assert sampled_weights(tmp_path / "a") != sampled_weights(tmp_path / "b")


def test_names_of_tensors_count(tmp_path: Path) -> None:
    original = tensors()
    weights(tmp_path / "a", original)
    weights(
        tmp_path / "b", {name.replace("layer.150", "layen.150"): t for name, t in original.items()}
    )
    assert sampled_weights(tmp_path / "a") != sampled_weights(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"{}" * 5000])
def test_files_that_are_no_safetensors_are_sampled_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    first = sampled_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content + b"\0")
    assert sampled_weights(tmp_path) != first


def changes(file: Path, at: int) -> bool:
    """Whether another byte there makes it other weights."""
    before, content = sampled_weights(file.parent), bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    after = sampled_weights(file.parent)
    content[at] ^= 1
    file.write_bytes(content)
    return before != after


PAGE = 4096


def test_pages_at_equal_distances_and_the_last_one_are_sampled(tmp_path: Path) -> None:
    file, size = tmp_path / "model.bin", 64 * 3 * PAGE
    file.write_bytes(bytes(size))
    for number in range(64):
        begin = number * 3 * PAGE
        assert changes(file, begin)
        assert changes(file, begin + PAGE - 1)
        assert not changes(file, begin + PAGE)
        assert changes(file, begin + 3 * PAGE - 1) == (number == 63)
    assert changes(file, size - PAGE)
    assert not changes(file, size - PAGE - 1)


def test_the_middle_of_each_tensor_is_sampled_and_the_whole_header(tmp_path: Path) -> None:
    lengths = [3 * 2**20, 2 * 2**20, 2**20 + 500_000]
    made = {f"layer.{i}": np.zeros(length // 4, np.float32) for i, length in enumerate(lengths)}
    weights(tmp_path, made)
    file = tmp_path / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    begin = header
    for length in lengths:
        assert changes(file, begin + length // 2)
        assert changes(file, begin + length // 2 + PAGE - 1)
        begin += length


@pytest.mark.parametrize("tail", [b"", bytes(100_000)])
def test_every_byte_of_a_long_header_counts(tmp_path: Path, tail: bytes) -> None:
    """Also of a file that has nothing but its header."""
    text = json.dumps({"__metadata__": {"about": "x" * 1_000_000}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + tail)
    for page in range(0, len(text) - PAGE, 7 * PAGE):
        if page > PAGE:
            assert changes(file, page + 123)
    assert changes(file, 7 + len(text) - 100)


def test_names_and_lengths_of_files_count(tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a.bin", b"x"), ("b.bin", b"x"), ("a.bin", b"xy"), ("a.pt", b"x")):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        (folder / name).write_bytes(content)
        (folder / "tokenizer.txt").write_bytes(b"no weights")
        digests.add(sampled_weights(folder))
    assert len(digests) == 4
    small = set()
    for name, content in (("a.json", b"x"), ("b.json", b"x"), ("a.json", b"xy"), ("a.bin", b"x")):
        folder = tmp_path / f"small{len(small)}"
        folder.mkdir()
        (folder / name).write_bytes(content)
        small.add(small_files(folder))
    assert len(small) == 4
    assert {len(digest or b"") for digest in digests | small} == {32}


def test_without_weights_there_is_no_digest(tmp_path: Path) -> None:
    assert sampled_weights(tmp_path) is None


def test_the_tokenizer_counts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    first = small_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert small_files(tmp_path) != first


def test_the_files_of_a_model_are_in_its_folder_or_beside_its_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert _folder(str(tmp_path), None, None) == _folder(str(file), None, None) == tmp_path
    assert _folder("nobody/has-such-a-model", None, str(tmp_path)) is None


def test_values_count_by_name() -> None:
    assert digest_of({"a": 1, "b": (2, None)}) == digest_of({"b": [2, None], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    assert digest_of({"a": 1}) != digest_of({"b": 1})


def config(model: Path, **arguments: Any) -> VllmConfig:
    environment = dict(os.environ)
    found = EngineArgs(model=str(model), enforce_eager=True, **arguments).create_engine_config()
    for name in set(os.environ) - set(environment):
        del os.environ[name]  # marks for processes to come
    return found


def fingerprint(config: VllmConfig) -> bytes:
    return model_fingerprint(config, KvGroup(0, {"layers.0": "heads=2"}, 32))


def test_a_model_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    model = make_model("qwen3")
    shutil.copytree(model, tmp_path / "copy")
    first = fingerprint(config(model))
    assert fingerprint(config(tmp_path / "copy")) == first
    for changed in (
        config(model, dtype="float32"),
        config(model, hf_overrides={"rope_theta": 5e5}),
        config(model, load_format="dummy"),
    ):
        assert fingerprint(changed) != first
    assert model_fingerprint(config(model), KvGroup(0, {"layers.0": "heads=4"}, 32)) != first
    group = KvGroup(0, {"layers.0": "heads=2"}, 32)
    assert model_fingerprint(config(model), group, "raw") == first
    codecs = {model_fingerprint(config(model), group, codec) for codec in ("int8", "fp8")}
    assert len(codecs - {first}) == 2


def test_another_tokenizer_is_another_model(tmp_path: Path) -> None:
    """Equal tokens would stand for other text."""
    model, other = make_model("qwen3"), tmp_path / "other"
    shutil.copytree(model, other)
    first = fingerprint(config(model, tokenizer=str(other)))
    assert first == fingerprint(config(model))
    (other / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    assert fingerprint(config(model, tokenizer=str(other))) != first


def drafting(model: Path, draft: Path) -> VllmConfig:
    """By another model."""
    by = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    return config(model, speculative_config=by)


def test_a_draft_counts_wherever_it_lies(tmp_path: Path) -> None:
    model, other = make_model("qwen3"), tmp_path / "other"
    shutil.copytree(model, tmp_path / "copy")
    shutil.copytree(model, other)
    weights(other, tensors())
    first = fingerprint(drafting(model, model))
    assert first != fingerprint(config(model))
    assert first == fingerprint(drafting(model, tmp_path / "copy"))
    assert first != fingerprint(drafting(model, other))
    (other / "model.safetensors").unlink()
    with pytest.raises(UnknownWeightsError, match="the weights of the draft"):
        fingerprint(drafting(model, other))


def test_weights_that_are_not_here_are_refused(tmp_path: Path) -> None:
    shutil.copytree(make_model("qwen3"), tmp_path / "copy")
    found = config(tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UnknownWeightsError, match="are not files of this machine"):
        fingerprint(found)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, "0"])
def test_hashes_that_collide_on_purpose_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    """Whether a process has a seed of its own, so that others find nothing, or shares it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    found = config(make_model("qwen3"), prefix_caching_hash_algo=algorithm)
    if algorithm.startswith("sha256"):
        assert len(fingerprint(found)) == 32
        return
    with pytest.raises(UnsafeNamesError, match=rf"{algorithm}, .*use --prefix-caching-hash-algo"):
        fingerprint(found)
