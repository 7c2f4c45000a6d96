# SPDX-License-Identifier: Apache-2.0
"""What a pass takes on the device beyond what vLLM measures is known before the cache is sized."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_segreuse.config.memory import kv_bytes, pass_bytes, state_bytes_per_token

FIXED = 272 << 20
"""Scratch of overlapping moves (256 MiB), and buffers of a metadata builder (16 MiB)."""


def config(
    backend: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_model_len: int = 1000,
    chunk: int = 100_000,
    lora: bool = False,
    speculative: Any = None,
    latent: bool = False,
    images: bool = False,
    alone: Any = None,
    windows: Mapping[str, int] = MappingProxyType({}),
    stages: int = 1,
    **options: Any,
) -> Any:
    model = SimpleNamespace(
        use_mla=latent,
        dtype=dtype,
        max_model_len=max_model_len,
        is_multimodal_model=images,
        hf_config=SimpleNamespace(segreuse=alone),
        hf_text_config=SimpleNamespace(**windows),
        get_hidden_size=lambda: 64,
        get_num_attention_heads=lambda parallel: 8 // parallel.tensor_parallel_size,
        get_head_size=lambda: 128,
        get_num_kv_heads=lambda parallel: 4 // parallel.tensor_parallel_size,
        get_num_layers=lambda _: 10,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=chunk),
        lora_config=object() if lora else None,
        speculative_config=speculative,
        attention_config=SimpleNamespace(backend=backend and SimpleNamespace(name=backend)),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options),
    )


@pytest.mark.parametrize(("dtype", "element"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_states_of_the_longest_prompt_and_of_a_step_beside_it(
    dtype: torch.dtype, element: int
) -> None:
    hidden_states_and_residual = 2 * (1000 + 100_000) * 64 * element
    queries_of_a_chunk = 100_000 * 4 * 128 * (2 * element + 4)
    expected = hidden_states_and_residual + (1000 + 100_000) * 256 + queries_of_a_chunk + FIXED
    assert pass_bytes(config(dtype=dtype)) == expected


def test_a_chunk_whose_keys_are_compared_may_take_more_than_its_queries() -> None:
    of_few_heads = config()
    of_few_heads.model_config.get_num_attention_heads = lambda _: 2
    less = 100_000 * 128 * (4 * 8 - 2 * (4 * 2 + 8))
    assert pass_bytes(config()) - pass_bytes(of_few_heads) == less


def test_heads_of_layers_without_a_window_may_be_wider() -> None:
    """Gemma 4: `head_dim` is of the layers with one."""
    wider = config(windows={"global_head_dim": 512})
    assert pass_bytes(wider) - pass_bytes(config()) == 100_000 * 4 * (512 - 128) * (2 * 2 + 4)


@pytest.mark.parametrize(("spread_tokens", "share"), [(None, 50_000), (700, 700), (0, 100_000)])
def test_between_pipeline_stages_states_of_two_steps_are_held_to_be_sent(
    spread_tokens: int | None, share: int
) -> None:
    staged = config(stages=2, spread_tokens=spread_tokens)
    more = pass_bytes(staged) - pass_bytes(config(spread_tokens=spread_tokens))
    assert more == 2 * (share + 100_000) * (2 * 64 * 2 + 256)


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_where_layers_attend_to_windows_states_are_held_twice(name: str) -> None:
    states = 2 * (1000 + 100_000) * 64 * 2
    assert pass_bytes(config(windows={name: 100})) - pass_bytes(config()) == states


@pytest.mark.parametrize(
    ("method", "named", "layers"),
    [("eagle3", None, 3), ("eagle3", [1, 5], 2), ("eagle", [1, 5], 0), ("ngram", None, 0)],
)
def test_what_enters_layers_is_kept_for_eagle3(method: str, named: Any, layers: int) -> None:
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=named)
    draft = SimpleNamespace(hf_config=hf_config)
    drafting = config(speculative=SimpleNamespace(method=method, draft_model_config=draft))
    assert pass_bytes(drafting) - pass_bytes(config()) == layers * (1000 + 100_000) * 64 * 2


@pytest.mark.parametrize("at_once", [{"lora": True}, {"images": True}, {"alone": {}}], ids=str)
def test_a_plan_that_is_never_spread_may_be_computed_beside_one_that_is_under_way(
    at_once: Any,
) -> None:
    another = 1000 * (2 * 64 * 2 + 256)
    assert pass_bytes(config(**at_once)) - pass_bytes(config()) == another


def test_what_halos_are_compared_with_is_kept_at_all_layers() -> None:
    """256 tokens of the longest prompt and one of each segment, a step's plans beside it."""
    halo = {"halo_tokens": 8, "max_boundary_drift": 0.3, "min_run_tokens": 4}
    tokens = 256 + 1000 // 9 + 512
    of_a_token = 2 * 128 * (2 * 10 * 2 + 4 * 4)
    plain = pass_bytes(config(similarity={}))
    assert plain == pass_bytes(config()) == pass_bytes(config(similarity={"halo_tokens": 8}))
    assert pass_bytes(config(similarity=halo)) - plain == tokens * of_a_token
    of_few = pass_bytes(config(similarity=halo, max_step_tokens=100)) - plain
    assert of_few == (tokens - 412) * of_a_token
    two = pass_bytes(config(similarity=halo, lora=True)) - pass_bytes(config(lora=True))
    assert two == (2 * tokens - 512) * of_a_token


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_backends_without_a_workspace_take_no_more(backend: str) -> None:
    assert pass_bytes(config(backend)) == pass_bytes(config(None))


@pytest.mark.parametrize("chunk", [100, 100_000])
def test_flashinfer_has_a_workspace_by_rank(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as envs

    least = envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
    workspace = pass_bytes(config("FLASHINFER", chunk=chunk)) - pass_bytes(config(chunk=chunk))
    assert workspace == max(least, chunk * 4 * 128 * 16)
    assert (workspace == least) == (chunk == 100)


def test_the_scratch_is_that_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_segreuse.config import memory
    from vllm_segreuse.kernels.scratch import SCRATCH_BYTES, layers_at_once

    with_scratch = pass_bytes(config())
    monkeypatch.setattr(memory, "SCRATCH_BYTES", 0)
    assert with_scratch - pass_bytes(config()) == SCRATCH_BYTES == 256 << 20
    assert layers_at_once(80, SCRATCH_BYTES // 3) == 3
    assert layers_at_once(2, 1) == 2
    assert layers_at_once(80, SCRATCH_BYTES + 1) == 1


def test_states_that_tokens_enter_from_are_joined_with_others() -> None:
    states = 2 * (1000 + 100_000) * 64 * 2
    entering = config(similarity={"w_exact": {8: 4}})
    assert pass_bytes(entering) - pass_bytes(config()) == 2 * states


def test_boundary_states_take_a_row_and_a_position_per_token_and_cut() -> None:
    assert state_bytes_per_token(config(), (8, 16)) == 2 * (64 * 2 + 4)
    assert state_bytes_per_token(config(dtype=torch.float32), (8,)) == 64 * 4 + 4
    assert state_bytes_per_token(config(), ()) == 0


def test_kv_and_its_boundary_states_share_what_is_left() -> None:
    spec = SimpleNamespace(page_size_bytes=16 * 200, block_size=16)
    left = kv_bytes(10**9, config(), {"first": spec, "second": spec}, (8,))
    tokens = left / 400
    assert left + tokens * state_bytes_per_token(config(), (8,)) == pytest.approx(10**9, rel=1e-6)


def test_builders_for_latent_vectors_set_a_context_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    size = "determine_chunked_prefill_workspace_size"
    monkeypatch.setattr(MLACommonMetadataBuilder, size, staticmethod(lambda _: 5000))
    assert pass_bytes(config(latent=True)) - pass_bytes(config()) == 5000 * 128 * 2
    halo = {"halo_tokens": 8, "max_boundary_drift": 0.3, "min_run_tokens": 4}
    of_halos = pass_bytes(config(latent=True, similarity=halo)) - pass_bytes(config(latent=True))
    # Per token one vector at ten layers, and four of its size in float32.
    assert of_halos == (256 + 1000 // 9 + 512) * 2 * 128 * (10 * 2 + 4 * 4)
