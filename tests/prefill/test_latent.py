# SPDX-License-Identifier: Apache-2.0
"""A model with multi-head latent attention (MLA) is proven at start-up, and refused if anything
that is known of its layers is wrong."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.shapes import LATENT as LATENT_SHAPES
from tests.latent import BLOCK_SIZE, prefix_cache_for_latents
from tests.prefill.loaded import Loaded, loaded, prove, refusal
from vllm_segreuse.compat import attention_impl
from vllm_segreuse.kernels import reference
from vllm_segreuse.model import rope, token_kv
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.kv_layout import discover_layout
from vllm_segreuse.prefill import attention, rows
from vllm_segreuse.prefill.proofs import attention as proof
from vllm_segreuse.prefill.rows import RowBuilder
from vllm_segreuse.prefill.tokens import HostTokens, TokenTable

LATENT, TURNING, BLOCKS = 512, 64, 40
SHAPE = LATENT_SHAPES["deepseek_v2"]
DEEPSEEK: dict[str, Any] = SHAPE.config | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": SHAPE.model_type,
    "first_k_dense_replace": SHAPE.config["num_hidden_layers"],
}
"""Without experts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with (
        prefix_cache_for_latents(),
        loaded(tmp_path_factory.mktemp("deepseek"), num_blocks=BLOCKS, **DEEPSEEK) as found,
    ):
        yield found


def test_it_is_proven(model: Loaded) -> None:
    runtime = prove(model)
    assert runtime.max_deviation < 1e-4
    assert "rows of vLLM's kernel and scores by torch (latent KV of 576 channels)" in (
        runtime.kernels
    )


def test_its_keys_lie_behind_its_values(model: Loaded) -> None:
    layer = model.first
    found = discover_layout(layer, BLOCK_SIZE)
    assert found.keys.shape == (1, BLOCK_SIZE, TURNING)
    assert found.values.shape == (1, BLOCK_SIZE, LATENT)
    slots = torch.tensor([70, 33, 5])
    keys, values = torch.randn(3, 1, TURNING), torch.randn(3, 1, LATENT)
    token_kv.write(layer, keys, values, slots)
    pages = typed_pages(layer)
    assert torch.equal(found.keys.tokens(pages)[slots], keys)
    assert torch.equal(found.values.tokens(pages)[slots], values)
    assert torch.equal(found.attended.tokens(pages)[slots], torch.cat([values, keys], -1))


def test_scores_are_the_attention_that_the_layer_pays(model: Loaded) -> None:
    """Taken from what is cached, for queries that were never projected; by the definition of MLA,
    from keys and values of every head."""
    layer, count = model.first, 20
    heads, plain = layer.num_heads, layer.qk_nope_head_dim
    keys, values = torch.randn(count, 1, TURNING), torch.randn(count, 1, LATENT)
    token_kv.write(layer, keys, values, torch.arange(BLOCK_SIZE, BLOCK_SIZE + count))
    query = torch.randn(3, heads, plain + TURNING)
    positions = torch.tensor([4, 11, count - 1])
    both = layer.kv_b_proj(values.flatten(1))[0].view(count, heads, -1)
    whole = torch.cat([both[..., :plain], keys.expand(-1, heads, -1)], -1)
    logits = torch.einsum("qhd,khd->hqk", query, whole) * layer.impl.scale
    logits.masked_fill_(torch.arange(count) > positions[:, None], float("-inf"))
    found = reference.token_scores(
        attention_impl.absorbed_queries(layer, query),
        positions,
        typed_pages(layer),
        discover_layout(layer, BLOCK_SIZE).attended,
        torch.tensor([1, 2]),
        count,
        layer.impl.scale,
    )
    torch.testing.assert_close(found, logits.softmax(-1).sum((0, 1)), rtol=1e-4, atol=1e-5)


def test_a_rotation_of_other_pairs_is_refused(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    derive = rope.derive

    def of_other_pairs(*args: Any) -> rope.DeltaRope:
        found = derive(*args)
        return rope.DeltaRope(found.frequencies, found.rotary_dim, not found.neox)

    monkeypatch.setattr(rope, "derive", of_other_pairs)
    assert "does not turn with its position as its rotary module says" in refusal(model)


def test_queries_that_are_not_absorbed_are_refused(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    absorbed = proof.absorbed_queries

    def spoilt(layer: Any, query: torch.Tensor) -> torch.Tensor:
        found = absorbed(layer, query)
        found[..., :LATENT] = found[..., :LATENT].roll(1, dims=-1)
        return found

    monkeypatch.setattr(proof, "absorbed_queries", spoilt)
    assert "does not attend to all tokens before" in refusal(model)


def test_logits_of_the_proof_are_neither_all_alike_nor_far_apart(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else queries that are wrong would give the same weights: all alike, or of one key."""
    attend = reference.attend
    logits: list[torch.Tensor] = []

    def noting(query: torch.Tensor, key: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        scale = given[2]
        logits.append(torch.einsum("qhd,td->hqt", query.float(), key[:2, 0]) * scale)
        return attend(query, key, *given, **more)

    monkeypatch.setattr(proof.reference, "attend", noting)
    prove(model)
    assert all(0.8 < found.square().mean().sqrt() < 1.25 for found in logits)


def test_decodes_that_see_the_future_are_refused(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    common_metadata = rows.common_metadata

    def one_more(*given: Any, **named: Any) -> Any:
        found = common_metadata(*given, **named)
        found.seq_lens += 1
        return found

    monkeypatch.setattr(rows, "common_metadata", one_more)
    assert "does not" in refusal(model)


@pytest.fixture
def builder(model: Loaded) -> RowBuilder:
    specs = {name: it.get_kv_cache_spec(model.vllm_config) for name, it in model.attention.items()}
    return RowBuilder(model.vllm_config, model.attention, specs, 256)


def tokens(positions: list[int]) -> TokenTable:
    at = torch.tensor(positions)
    nobody = torch.zeros_like(at)
    return TokenTable(at, at, nobody, at, HostTokens(at.numpy(), nobody.numpy()))


TABLE = torch.arange(1, BLOCKS, dtype=torch.int32)[None]


def test_scattered_tokens_are_decodes_and_long_runs_are_prefill(builder: RowBuilder) -> None:
    scattered = [*range(5), *range(20, 30), 40]
    [found] = {id(it): it for it in builder.metadata(tokens(scattered), TABLE).values()}.values()
    assert (found.num_decodes, found.num_prefills) == (len(scattered), 0)
    assert found.decode.seq_lens.tolist() == [position + 1 for position in scattered]
    runs = [*range(20), *range(30, 60)]
    [found] = {id(it): it for it in builder.metadata(tokens(runs), TABLE).values()}.values()
    assert (found.num_decodes, found.num_prefills) == (0, 2)
    assert found.prefill.query_start_loc.tolist() == [0, 20, 50]
    assert found.prefill.chunked_context.context_lens_list == [0, 30]


def test_no_more_are_decoded_at_once_than_have_room(
    builder: RowBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_DECODES", 6)
    one_by_one, run = tokens(list(range(0, 80, 2))), tokens(list(range(80)))
    assert builder.most_tokens(one_by_one) == 6, "more than vLLM's four sequences"
    assert builder.most_tokens(run) == 80
    whole = attention.PassAttention(builder, _known())
    found = list(whole.parts(one_by_one, 15))
    assert [part.stop - part.start for part, _ in found] == [6, 6, 3, 6, 6, 3, 6, 4]
    joined = torch.cat([chunk.positions for _, chunk in found])
    assert torch.equal(joined, one_by_one.positions)
    for part, chunk in found:
        assert torch.equal(one_by_one.positions[part], chunk.positions)
    assert [len(chunk) for _, chunk in whole.parts(run, 50)] == [50, 30]


def _known() -> Any:
    kernels = SimpleNamespace(sparse_attention=None, plan_attention=None)
    layout = SimpleNamespace(keys=SimpleNamespace(shape=(1, BLOCK_SIZE, TURNING)))
    layer = SimpleNamespace(attention=object(), kernels=kernels, layout=layout, table=0)
    return [layer]
