# SPDX-License-Identifier: Apache-2.0
"""Which KV cache segments are reused in; one of any other shape is refused with its cause."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.test_supported import WITHOUT
from vllm_segreuse.engine.kv_group import KvGroup, segment_group
from vllm_segreuse.engine.supported import RefusedError

SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **SHAPE)


def kv_cache(*specs: Any, hash_block_size: int | None = None) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=9,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hash_block_size=hash_block_size,
    )


@pytest.mark.parametrize("hash_block_size", [None, 16])
def test_one_group_of_full_attention_is_supported(hash_block_size: int | None) -> None:
    found = segment_group(kv_cache(FULL, hash_block_size=hash_block_size))
    assert found == KvGroup(0, {"layer 0": FULL}, 16, tables={"layer 0": 0})
    assert [*found.specs] == ["layer 0"]
    assert found.of(([3, 1, 2],)) == [3, 1, 2]


def test_latent_vectors_are_kept_for_all_tokens_too() -> None:
    latent = MLAAttentionSpec(block_size=16, **SHAPE)
    assert set(segment_group(kv_cache(latent)).specs.values()) == {latent}


def test_a_model_without_kv_is_refused_by_that_reason() -> None:
    with pytest.raises(RefusedError, match="no layer of the model keeps KV, as where tokens"):
        segment_group(kv_cache())


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ([FULL, FULL], "2 KV cache groups (FullAttentionSpec)"),
        (
            [FULL, ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **SHAPE)],
            "2 KV cache groups (ChunkedLocalAttentionSpec, FullAttentionSpec)",
        ),
        (
            [SlidingWindowMLASpec(block_size=16, sliding_window=64, **SHAPE)],
            "1 KV cache groups (SlidingWindowMLASpec)",
        ),
    ],
)
def test_any_other_shape_of_cache_is_refused(specs: list[Any], found: str) -> None:
    with pytest.raises(RefusedError) as refused:
        segment_group(kv_cache(*specs))
    assert str(refused.value) == (
        f"segment reuse cannot start: the model needs {found}, one group whose blocks are kept for "
        f"all tokens is supported; {WITHOUT}"
    )


@pytest.mark.parametrize("windows", [[64], [64, 128]])
def test_a_model_of_windows_only_is_refused(windows: list[int]) -> None:
    specs = [SlidingWindowSpec(block_size=16, sliding_window=w, **SHAPE) for w in windows]
    with pytest.raises(RefusedError) as refused:
        segment_group(kv_cache(*specs))
    assert str(refused.value) == (
        "segment reuse cannot start: every layer of the model attends to a sliding window; limit "
        "prompts to the window with --disable-sliding-window, or " + WITHOUT
    )


def test_layers_with_windows_are_supported_among_others() -> None:
    """As vLLM gives them without its hybrid KV cache manager: one spec has the window of some."""
    some = FullAttentionSpec(block_size=16, sliding_window=64, **SHAPE)
    assert segment_group(kv_cache(some)).specs == {"layer 0": some}


def test_layers_of_several_head_sizes_have_a_spec_each() -> None:
    wide = FullAttentionSpec(block_size=16, **SHAPE | {"head_size": 64})
    specs = {"a": FULL, "b": wide}
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    cache = kv_cache(several)
    cache.kv_cache_groups[0].layer_names[:] = ["b", "a"]
    found = segment_group(cache)
    assert (found.specs, [*found.specs], found.block_size) == (specs, ["b", "a"], 16)


def test_layers_with_windows_may_keep_fewer_blocks() -> None:
    """As vLLM's hybrid KV cache manager has them: a table each, of blocks of one size."""
    wide, narrow = (SlidingWindowSpec(block_size=16, sliding_window=w, **SHAPE) for w in (96, 64))
    found = segment_group(kv_cache(wide, FULL, narrow))
    assert (found.index, found.others, found.windows) == (1, (0, 2), (96, 64))
    assert found.tables == {"layer 1": 0, "layer 0": 1, "layer 2": 2}
    assert found.specs == {"layer 1": FULL, "layer 0": wide, "layer 2": narrow}
    assert found.num_tables == 3
    assert found.of(["a", "b", "c"]) == "b"
    assert found.of_others(["a", "b", "c"]) == ["a", "c"]


def test_blocks_of_several_sizes_are_refused() -> None:
    """As where heads of windowed layers are narrower: Gemma 4."""
    windowed = SlidingWindowSpec(block_size=32, sliding_window=64, **SHAPE)
    with pytest.raises(RefusedError) as refused:
        segment_group(kv_cache(FULL, windowed))
    assert str(refused.value) == (
        "segment reuse cannot start: layers with a sliding window have blocks of another size than "
        "the others (16, 32 tokens), because their heads differ; remove "
        "--no-disable-hybrid-kv-cache-manager, so that vLLM keeps all of their blocks"
    )


def test_full_attention_that_hides_another_kind_is_refused() -> None:
    spec = FullAttentionSpec(block_size=16, **SHAPE, non_causal=True)
    why = f"layers of the model attend to tokens behind their own; {WITHOUT}"
    with pytest.raises(RefusedError, match=why):
        segment_group(kv_cache(spec))


def test_layers_with_chunks_may_keep_the_blocks_of_all_tokens() -> None:
    spec = FullAttentionSpec(block_size=16, **SHAPE, attention_chunk_size=128)
    assert segment_group(kv_cache(spec)).block_size == 16


def test_blocks_that_are_hashed_in_pieces_are_refused() -> None:
    with pytest.raises(RefusedError) as refused:
        segment_group(kv_cache(FULL, hash_block_size=8))
    assert str(refused.value).endswith(
        "blocks of 16 tokens are hashed in pieces of 8; leave the hash block size at its default"
    )
