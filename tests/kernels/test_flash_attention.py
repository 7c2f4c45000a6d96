# SPDX-License-Identifier: Apache-2.0
"""Which pages FlashAttention 3 is given, and how; on a GPU that runs it, that it is right."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import Shape, channel_tiles, hnd, nhd, shape_of
from tests.kernels.attention_cases import assert_close, make_batch, varlen_attention
from vllm_segreuse.kernels import flash_attention
from vllm_segreuse.kernels.flash_attention import CommonKeys
from vllm_segreuse.kernels.pages import PageLayout

BF16 = torch.bfloat16


def layout(shape: Shape) -> PageLayout:
    assert shape.values is not None
    return PageLayout(shape.keys, shape.values)


@pytest.mark.parametrize(
    ("shape", "dtype", "queries", "served"),
    [
        (nhd(2, 16, 128), BF16, BF16, True),
        (hnd(2, 32, 80), torch.float16, torch.float16, True),
        (nhd(2, 16, 256), BF16, BF16, True),
        (nhd(2, 16, 264), BF16, BF16, False),
        (nhd(2, 16, 60), BF16, BF16, False),
        (nhd(2, 24, 128), BF16, BF16, False),
        (channel_tiles(2, 16, 64, 16), BF16, BF16, False),
        (shape_of("tiled by 16"), BF16, BF16, False),
        (nhd(2, 16, 128), torch.float32, torch.float32, False),
        (nhd(2, 16, 128), torch.float8_e4m3fn, BF16, False),
    ],
)
def test_pages_that_it_takes(
    shape: Shape,
    dtype: torch.dtype,
    queries: torch.dtype,
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "find_varlen_attention", lambda: varlen_attention)
    assert flash_attention.supports(layout(shape), dtype, queries) == served
    monkeypatch.setattr(flash_attention, "find_varlen_attention", lambda: None)
    assert not flash_attention.supports(layout(shape), dtype, queries)


def test_values_of_another_size_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "find_varlen_attention", lambda: varlen_attention)
    keys = nhd(2, 16, 128).keys
    values = replace(keys, shape=(2, 16, 64), channel_tile=64)
    assert not flash_attention.supports(PageLayout(keys, values), BF16, BF16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="may have it")
def test_without_a_gpu_there_is_none() -> None:
    assert flash_attention.find_varlen_attention() is None


@pytest.mark.parametrize(
    ("on_gpu", "has_it", "runs_it", "found"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
def test_it_is_vllms_where_that_has_version_3(
    on_gpu: bool, has_it: bool, runs_it: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = SimpleNamespace(
        is_fa_version_supported=lambda version: version == 2 or runs_it,
        flash_attn_varlen_func=varlen_attention,
    )
    package = SimpleNamespace(flash_attn_interface=interface) if has_it else None
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    expected = varlen_attention if found else None
    assert flash_attention.find_varlen_attention.__wrapped__() is expected


@pytest.mark.parametrize("shape", [nhd(2, 16, 24), hnd(2, 16, 24)], ids=["nhd", "hnd"])
def test_it_is_given_pages_in_place(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a larger cache, and queries in the order of the tiles."""
    batch = make_batch(shape, 2, [[3, 40, 41], [70]], torch.float32, "cpu")
    cache = torch.full((len(batch.pages), 3, batch.pages.shape[1]), 7.0)
    cache[:, 1] = batch.pages
    given: dict[str, Any] = {}

    def noting(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.update(arguments)
        return varlen_attention(**arguments)

    monkeypatch.setattr(flash_attention, "find_varlen_attention", lambda: noting)
    order = torch.tensor([3, 1, 2, 0])
    bounds, lengths = torch.tensor([0, 1, 3, 4]).int(), torch.tensor([64, 32, 0]).int()
    tables = batch.block_tables[[1, 0, 0]]
    common = CommonKeys(order, bounds, lengths, tables, 2, 96)
    assert shape.values is not None
    where = (cache[:, 1], shape.keys, shape.values, common)
    out, lse = flash_attention.attend(batch.query, *where, 0.5, 0.0)
    assert torch.equal(given["q"], batch.query[order])
    assert given["k"].untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    for row, (query, request, length) in enumerate([(3, 1, 64), (1, 0, 32), (2, 0, 32)]):
        blocks = batch.block_tables[request, : length // 16].long()
        key, value = (
            part.tokens(batch.pages[blocks]).repeat_interleave(2, 1)
            for part in (shape.keys, shape.values)
        )
        logits = torch.einsum("hd,khd->hk", batch.query[query], key) * 0.5
        torch.testing.assert_close(lse[:, row], logits.logsumexp(-1))
        mean = torch.einsum("hk,khd->hd", logits.softmax(-1), value)
        torch.testing.assert_close(out[row], mean)


@pytest.mark.skipif(flash_attention.find_varlen_attention() is None, reason="no FlashAttention 3")
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (4, 128), (3, 80), (2, 256)])
@pytest.mark.parametrize("make", [nhd, hnd])
def test_attention_behind_its_keys_is_as_exact_as_torch(
    make: Callable[..., Shape], group: int, head_size: int, dtype: torch.dtype
) -> None:
    from tests.kernels import test_triton_attention as attention

    torch.manual_seed(0)
    shape = make(2, 16, head_size)
    places = [sorted(torch.randperm(900)[:300].tolist()), [], [*range(700, 760)], [3, 500]]
    batch = make_batch(shape, group, places, dtype)
    exact, plain = attention.expected(batch, shape), attention.in_plain_torch(batch, shape)
    for splits in (1, 3):
        found = attention.run(batch, shape, splits, common_tiles=0)
        assert_close(found, exact, plain, dtype)
