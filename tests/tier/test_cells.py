# SPDX-License-Identifier: Apache-2.0
"""Cells are as large as what they hold, and the scheduler's process and workers agree on it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_segreuse.engine import kv_group
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.cells import StoredPage, cell_content_bytes, views

LAYERS = 3
HEADS, TOKENS, CHANNELS = 8, 32, 128
CODED = [Codec.INT8, Codec.FP8]


def kv_cache(num_blocks: int = 7, **changed: Any) -> Any:
    """vLLM's configuration of layers that are alike."""
    given = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": CHANNELS,
        "dtype": torch.bfloat16,
    }
    spec = FullAttentionSpec(**{**given, **changed})
    names = [f"layers.{number}" for number in range(LAYERS)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
    tensor = SimpleNamespace(size=LAYERS * spec.page_size_bytes * num_blocks)
    return SimpleNamespace(
        kv_cache_groups=[group],
        kv_cache_tensors=[tensor] * LAYERS,
        num_blocks=num_blocks,
        hash_block_size=None,
    )


def test_raw_cells_are_as_large_as_blocks() -> None:
    config = kv_cache()
    size = cell_content_bytes(config, Codec.RAW)
    assert size == LAYERS * 2 * HEADS * TOKENS * CHANNELS * 2
    config.kv_cache_tensors = config.kv_cache_tensors[:1]
    assert cell_content_bytes(config, Codec.RAW) == size, "each has the size of all"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", CODED)
def test_the_scheduler_knows_what_workers_store(codec: Codec, dtype: torch.dtype) -> None:
    pages = torch.empty(4, 2 * HEADS * TOKENS * CHANNELS, dtype=dtype)
    shape = (HEADS, TOKENS, CHANNELS)
    stored = StoredPage.of(pages, codec, shape, shape)
    assert stored.dtype is torch.uint8
    assert LAYERS * stored.num_bytes == cell_content_bytes(kv_cache(dtype=dtype), codec)
    assert stored.num_bytes < 0.53 * pages.shape[1] * 2


def test_raw_pages_are_stored_as_they_are() -> None:
    pages = torch.empty(4, 96, dtype=torch.float16)
    assert StoredPage.of(pages, Codec.RAW, (1, 4, 12), (1, 4, 12)) == StoredPage(192, torch.float16)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": torch.float8_e4m3fn}, "KV in torch.float8_e4m3fn is stored by codec raw only"),
        ({"dtype": torch.uint8}, "KV in torch.uint8 is stored by codec raw only"),
        ({"head_size_v": 64}, "pages of layers.0 hold more than keys and values"),
        ({"page_size_padded": 1 << 20}, "pages of layers.0 hold more than keys and values"),
    ],
)
@pytest.mark.parametrize("codec", CODED)
def test_what_a_codec_cannot_store_is_refused(
    codec: Codec, changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_group, "_check_spec", lambda spec: None)
    cell_content_bytes(kv_cache(**changed), Codec.RAW)
    with pytest.raises(
        RefusedError, match=f"tier.codec is {codec}: {why}.*; set tier.codec to raw"
    ):
        cell_content_bytes(kv_cache(**changed), codec)


def test_pages_lie_one_behind_the_other() -> None:
    cells = torch.arange(2 * 64, dtype=torch.int8).view(2, 64)
    first, second = views(cells, [StoredPage(24, torch.float32), StoredPage(40, torch.uint8)])
    assert (first.shape, second.shape) == ((2, 6), (2, 40))
    assert second[1, 0] == 64 + 24
    with pytest.raises(RefusedError, match=r"65 bytes, of which vLLM's .* has 64"):
        views(cells, [StoredPage(25, torch.uint8), StoredPage(40, torch.uint8)])
