# SPDX-License-Identifier: Apache-2.0
"""Layers that attend within chunks of positions (Llama 4) are proven, and computed by the kernels
of others: each chunk of a request is a request of its own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.prefill.loaded import BLOCK_SIZE, LAYERS, Loaded, loaded, prove, refusal
from vllm_segreuse.kernels import reference
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.plan import ModelLayers
from vllm_segreuse.prefill import checks
from vllm_segreuse.prefill.attention import ScatteredQueries
from vllm_segreuse.prefill.proofs import rotations

CHUNK = 2 * BLOCK_SIZE
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_chunk_size": CHUNK,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
    "intermediate_size_mlp": 64,
    "num_local_experts": 1,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 400,
    "attn_scale": 0.1,
}
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Chunks, all tokens without a rotation, chunks."""
    with loaded(tmp_path_factory.mktemp("llama4"), **LLAMA4) as made:
        yield made


def test_chunks_are_proven(chunked: Loaded) -> None:
    runtime = prove(chunked)
    assert runtime.max_deviation < 1e-5
    assert runtime.prefill.layers == ModelLayers(LAYERS, scored=(1,))


@pytest.mark.parametrize("error", [BLOCK_SIZE, -BLOCK_SIZE])
def test_a_chunk_of_another_length_is_found(
    error: int, chunked: Loaded, monkeypatch: Patch
) -> None:
    known = checks.kind_of

    def off(layer: Any, longest: int) -> AttentionKind:
        kind = known(layer, longest)
        return AttentionKind(chunk=kind.chunk + error) if kind.chunk else kind

    monkeypatch.setattr(checks, "kind_of", off)
    assert any(
        why in refusal(chunked)
        for why in ("does not attend to all tokens before in their chunk", "off by")
    )


def test_chunks_that_are_forgotten_are_found(chunked: Loaded, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ScatteredQueries, "in_chunks", lambda self, *_: self)
    assert "the pass does not" in refusal(chunked) or "off by" in refusal(chunked)


def test_a_chunk_is_whole_blocks(chunked: Loaded, monkeypatch: Patch) -> None:
    monkeypatch.setattr(chunked.first, "attention_chunk_size", CHUNK + 1)
    assert "attends to chunks of 65 tokens, which are no whole blocks of 32" in refusal(chunked)


def test_a_chunk_as_long_as_a_prompt_hides_nothing(chunked: Loaded) -> None:
    assert checks.kind_of(chunked.first, CHUNK) == AttentionKind()
    assert checks.kind_of(chunked.first, CHUNK + 1) == AttentionKind(chunk=CHUNK)


def test_each_chunk_is_a_request() -> None:
    tables = torch.tensor([[11, 12, 13], [21, 22, 23]], dtype=torch.int32)
    given = ScatteredQueries(tables, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 7, 8, 9]))
    found = given.in_chunks(chunk=8, blocks=2)
    assert found.block_tables.tolist() == [[11, 12], [13, 0], [21, 22], [23, 0]]
    assert found.request.tolist() == [0, 0, 1, 3]
    assert found.positions.tolist() == [0, 7, 0, 1]


def test_the_reference_hides_what_lies_before_the_chunk() -> None:
    value = torch.eye(6)[:, None]
    out = reference.attend(
        torch.zeros(2, 1, 6), torch.zeros(6, 1, 6), value, torch.tensor([3, 4]), 1.0, chunk=4
    )
    assert out[0, 0].tolist() == [0.25, 0.25, 0.25, 0.25, 0, 0]
    assert out[1, 0].tolist() == [0, 0, 0, 0, 1, 0]


def test_a_key_that_is_only_longer_is_turned_alike() -> None:
    key = torch.randn(5, 2 * 4)
    longer = key.view(5, 2, 4) * torch.rand(5, 2, 1).add(0.5)
    assert rotations.points_as(key, longer)
    assert rotations.points_as(torch.zeros(2, 8), torch.zeros(2, 2, 4))
    assert not rotations.points_as(key, longer + 1)
    assert not rotations.points_as(key[:4], longer)
