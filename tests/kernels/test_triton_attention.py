# SPDX-License-Identifier: Apache-2.0
"""The Triton `sparse_attention` is as exact as torch, and reads nothing that it may not see."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import Shape, channel_tiles, hnd, nhd, shape_of
from tests.kernels.attention_cases import (
    SOFTMAXES,
    Batch,
    assert_close,
    make_batch,
    softmaxes,
    varlen_attention,
)
from tests.kernels.triton_running import DEVICE, require_triton
from tests.prefill.pages import LAYOUTS
from vllm_segreuse.kernels import flash_attention, reference

require_triton()

from vllm_segreuse.kernels.triton_attention import sparse_attention  # noqa: E402
from vllm_segreuse.kernels.triton_schedule import Schedule, Tuning, plan  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def run(
    batch: Batch,
    shape: Shape,
    splits: int | None = None,
    tuning: Tuning | None = None,
    common_tiles: int | None = None,
    **softmax: Any,
) -> torch.Tensor:
    """What the kernel gives; NaN where it writes nothing. With `common_tiles`, from so many tiles
    on behind keys that FlashAttention 3 attends to."""
    keys, values = shape.keys, shape.values
    assert values is not None
    out = torch.full_like(batch.query, float("nan"))
    places = batch.block_tables, batch.request, batch.positions
    schedule = None
    if splits is not None or tuning is not None:
        schedule = plan(
            batch.query,
            keys,
            *places,
            splits=splits,
            tuning=tuning,
            flash=common_tiles is not None,
            common_tiles=common_tiles,
        )
    inputs = out, batch.query, batch.pages, keys, values, *places, batch.scale
    sparse_attention(*inputs, value_scale=batch.value_scale, schedule=schedule, **softmax)
    return out


def check(
    batch: Batch, shape: Shape, splits: int | None = None, tuning: Tuning | None = None
) -> None:
    assert_close(
        run(batch, shape, splits, tuning),
        expected(batch, shape),
        in_plain_torch(batch, shape),
        batch.query.dtype,
    )


def expected(batch: Batch, shape: Shape, **softmax: Any) -> torch.Tensor:
    """The reference, in float32."""
    out = torch.empty_like(batch.query, dtype=torch.float32)
    assert shape.values is not None
    reference.sparse_attention(
        out,
        batch.query.float(),
        batch.pages.float(),
        shape.keys,
        shape.values,
        batch.block_tables,
        batch.request,
        batch.positions,
        batch.scale,
        value_scale=batch.value_scale,
        **softmax,
    )
    return out


def in_plain_torch(batch: Batch, shape: Shape) -> torch.Tensor:
    """Every step in the dtype of the queries."""
    out = torch.empty_like(batch.query)
    assert shape.values is not None
    heads, size, _ = shape.keys.shape
    for i, (row, place) in enumerate(
        zip(batch.request.tolist(), batch.positions.tolist(), strict=True)
    ):
        pages = batch.pages[batch.block_tables[row, : place // size + 1].long()]
        key, value = (
            part.tokens(pages)[: place + 1].transpose(0, 1).to(out.dtype)
            for part in (shape.keys, shape.values)
        )
        query = batch.query[i].view(heads, -1, key.shape[2])
        weights = (query @ key.transpose(1, 2) * batch.scale).softmax(-1)
        out[i] = (weights @ value * batch.value_scale).flatten(0, 1)
    return out


@pytest.mark.parametrize(("dtype", "splits"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_the_smallest(dtype: torch.dtype, splits: int) -> None:
    """Two KV heads of three query heads, tiles of five queries, channels that are no power of two;
    queries alone, on both sides of a step's and a page's border, and more than a tile holds."""
    shape = channel_tiles(2, 8, 24, 8)
    places = [[0], [], [15, 16, 17], [3, 31, 32, 33, 34, 47, 48]]
    check(make_batch(shape, 3, places, dtype), shape, splits, Tuning(16, 16, 4, 2))


@pytest.mark.parametrize("splits", [1, 2])
def test_the_smallest_with_large_logits(splits: int) -> None:
    """Where later keys outweigh what is summed by then."""
    shape = shape_of("tiled by 16")
    batch = make_batch(shape, 1, [[2, 17, 40]], torch.float32)
    batch = replace(batch, query=200 * batch.query)
    check(batch, shape, splits, Tuning(16, 16, 4, 2))


def test_the_smallest_whose_offsets_need_more_than_32_bits() -> None:
    """Pages so far apart that the last begins behind 2**31 elements; none between is touched."""
    shape, stride = nhd(1, 16, 16), (1 << 30) + 16
    near = make_batch(shape, 1, [[17]], torch.float16)
    memory = torch.empty(2 * stride + shape.page_elements, dtype=torch.float16, device=DEVICE)
    far = memory.as_strided((3, shape.page_elements), (stride, 1))
    far[1:] = near.pages[near.block_tables[0, :2].long()]
    tables = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    moved = replace(near, pages=far, block_tables=tables)
    assert torch.equal(run(moved, shape), run(near, shape))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_the_smallest_with_windows_sinks_and_caps(softmax: str, splits: int) -> None:
    """Queries far apart and side by side in one tile; some splits have no key that a row sees."""
    shape = shape_of("tiled by 16")
    batch = make_batch(shape, 2, [[0, 1, 15, 16, 17, 90], [], [120, 135]], torch.float32)
    given = softmaxes(batch.query.shape[1])[softmax]
    given = {name: each.to(DEVICE) if name == "sinks" else each for name, each in given.items()}
    found = run(batch, shape, splits, Tuning(16, 16, 4, 2), **given)
    torch.testing.assert_close(found, expected(batch, shape, **given), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("softmax", ["", "sinks", "cap"])
def test_the_smallest_behind_common_keys(
    softmax: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3, here in plain torch, attends to the first keys of each tile: of two
    requests in turn, since longer tiles come first, and of tiles without such keys."""
    monkeypatch.setattr(flash_attention, "find_varlen_attention", lambda: varlen_attention)
    shape = nhd(2, 16, 24)
    places = [[0, 1, 15, 16, 17, 60, 61, 90], [], [120, 135], [31, 32, 33, 34, 99, 140]]
    batch = make_batch(shape, 3, places, torch.float32)
    given = softmaxes(batch.query.shape[1])[softmax] if softmax else {}
    given = {name: each.to(DEVICE) if name == "sinks" else each for name, each in given.items()}
    tuning = Tuning(16, 16, 4, 2)
    found = run(batch, shape, splits, tuning, common_tiles=0, **given)
    torch.testing.assert_close(found, expected(batch, shape, **given), atol=2e-6, rtol=1e-5)


SCATTERED = [[0, 3, 40, 41, 130], [], [70], [*range(60, 70), 200]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("group", "head_size"), [(1, 32), (3, 80), (4, 256)])
def test_dtypes_groups_and_head_sizes(
    dtype: torch.dtype, splits: int, group: int, head_size: int
) -> None:
    shape = nhd(1, 16, head_size)
    check(make_batch(shape, group, SCATTERED, dtype), shape, splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_smallest_with_pages_in_fp8(
    stored: torch.dtype, dtype: torch.dtype, splits: int
) -> None:
    shape = channel_tiles(2, 8, 24, 8)
    places = [[0], [], [15, 16, 17], [3, 31, 32, 33, 34, 47, 48]]
    check(make_batch(shape, 3, places, dtype, stored=stored), shape, splits, Tuning(16, 16, 4, 2))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    shape = shape_of(name)
    check(make_batch(shape, 2, [[5, 63, 64], [80]], torch.bfloat16), shape)


@pytest.mark.parametrize(
    "shape", [hnd(3, 8, 64), nhd(2, 24, 48), channel_tiles(2, 16, 64, 16)], ids=["8", "24", "tiles"]
)
def test_pages(shape: Shape) -> None:
    check(make_batch(shape, 2, [[7, 8, 24, 90], [23]], torch.float16), shape)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("place", [0, 14, 15, 16, 29, 30, 31, 32, 33, 62, 63, 64])
def test_edges_of_pages_and_steps(place: int, splits: int) -> None:
    """Steps of 32 keys: a query alone, the first of its tile, and between others."""
    shape = nhd(1, 16, 32)
    tuning = Tuning(16, 32, 4, 2)
    first = [place, place + 1, place + 40]
    batch = make_batch(shape, 2, [[place], first, sorted({0, *first, 97})], torch.bfloat16)
    check(batch, shape, splits, tuning)


@pytest.mark.parametrize("count", [1, 4, 5, 6, 11])
def test_queries_need_not_fill_their_tiles(count: int) -> None:
    """Five queries in groups of three heads fit in a tile of 16 rows."""
    shape = hnd(2, 16, 32)
    places = list(range(20, 20 + count))
    batch = make_batch(shape, 3, [places, places[:2]], torch.float32)
    check(batch, shape, tuning=Tuning(16, 16, 4, 2))


def test_more_splits_than_keys() -> None:
    shape = nhd(2, 16, 32)
    check(make_batch(shape, 2, [[0], [1, 17]], torch.float16), shape, splits=8)


def test_large_logits_do_not_overflow() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3, 70], [130]], torch.float32)
    batch = replace(batch, query=1000 * batch.query)
    for splits in (1, 2):
        check(batch, shape, splits)


def test_views_are_read_and_written_in_place() -> None:
    """Queries inside packed rows of queries, keys and values; pages inside a larger cache."""
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3, 20], [40]], torch.bfloat16)
    packed = torch.randn(3, 3, 6, 32, device=DEVICE).bfloat16()
    packed[:, 1, :4] = batch.query
    cache = torch.randn(len(batch.pages), 3, batch.pages.shape[1], device=DEVICE).bfloat16()
    cache[:, 1] = batch.pages
    out = torch.full((3, 9, 32), 7.0, dtype=torch.bfloat16, device=DEVICE)
    assert shape.values is not None
    sparse_attention(
        out[:, 2:6],
        packed[:, 1, :4],
        cache[:, 1],
        shape.keys,
        shape.values,
        batch.block_tables,
        batch.request,
        batch.positions,
        batch.scale,
    )
    assert torch.equal(out[:, 2:6], run(batch, shape))
    assert (out[:, :2] == 7).all()
    assert (out[:, 6:] == 7).all()


def test_a_schedule_serves_all_layers() -> None:
    shape = nhd(2, 16, 32)
    first = make_batch(shape, 2, [[3, 20, 60], [40]], torch.float16)
    places = first.block_tables, first.request, first.positions
    schedule = plan(first.query, shape.keys, *places)
    assert shape.values is not None
    for layer in (first, replace(first, query=2 * first.query, pages=-first.pages)):
        out = torch.empty_like(layer.query)
        inputs = layer.query, layer.pages, shape.keys, shape.values
        sparse_attention(out, *inputs, *places, layer.scale, schedule=schedule)
        assert torch.equal(out, run(layer, shape))
        assert_close(out, expected(layer, shape), in_plain_torch(layer, shape), out.dtype)


@settings(max_examples=5)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([nhd, hnd]))
    shape = make(data.draw(st.integers(1, 2)), data.draw(st.sampled_from([8, 16])), 32)
    places = data.draw(
        st.lists(st.sets(st.integers(0, 150), max_size=8), min_size=1, max_size=3).filter(any)
    )
    group, splits = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    batch = make_batch(shape, group, [sorted(chosen) for chosen in places], torch.float32)
    check(batch, shape, splits, Tuning(16, 16, 4, 2))


def test_nothing_to_attend() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[0]], torch.float32)
    none = replace(
        batch, query=batch.query[:0], request=batch.request[:0], positions=batch.positions[:0]
    )
    assert run(none, shape).shape == (0, 4, 32)


def test_what_does_not_fit_is_refused() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3, 20]], torch.float16)
    places = batch.block_tables, batch.request, batch.positions
    schedule = plan(batch.query, shape.keys, *places)
    with pytest.raises(ValueError, match=r"query is torch.float16 .* pages are torch.float32"):
        run(replace(batch, pages=batch.pages.float()), shape)
    with pytest.raises(ValueError, match="a multiple of 2 KV heads"):
        run(replace(batch, query=batch.query[:, :3]), shape)
    with pytest.raises(ValueError, match=r"query is \(2, 4, 16\)"):
        run(replace(batch, query=batch.query[..., :16]), shape)
    with pytest.raises(ValueError, match="the last of each must be 1"):
        run(replace(batch, block_tables=torch.cat([batch.block_tables] * 2)[:, ::2]), shape)
    with pytest.raises(ValueError, match=r"positions must be contiguous torch\.int64"):
        run(replace(batch, positions=batch.positions.int()), shape)
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        plan(batch.query[:, :3], shape.keys, *places)
    with pytest.raises(ValueError, match="tiles of 16 rows cannot hold 32 heads"):
        plan(batch.query.repeat(1, 16, 1), shape.keys, *places, tuning=Tuning(16, 16, 4, 2))
    assert shape.values is not None
    rest = (batch.pages, shape.keys, shape.values, *places, batch.scale)
    with pytest.raises(ValueError, match=r"out has shape \(1, 4, 32\)"):
        sparse_attention(batch.query[:1].clone(), batch.query, *rest)
    with pytest.raises(
        ValueError, match=r"out is torch.float32 on .*; expected it to be like query"
    ):
        sparse_attention(batch.query.float(), batch.query, *rest)
    with pytest.raises(ValueError, match=r"out is torch\.float16 on meta; expected it to"):
        sparse_attention(batch.query.to("meta"), batch.query, *rest)
    with pytest.raises(ValueError, match=r"strides \(128, 1, 4\); .* with channels side by side"):
        sparse_attention(batch.query.mT.contiguous().mT, batch.query, *rest)
    with pytest.raises(ValueError, match=r"strides of query are \(128, 1, 4\) and of the block"):
        run(replace(batch, query=batch.query.mT.contiguous().mT), shape)
    other = Schedule(schedule.tiles, 2, 4, 1, schedule.tuning)
    with pytest.raises(
        ValueError, match="for 2 queries in groups of 4 heads, not 2 in groups of 2"
    ):
        sparse_attention(torch.empty_like(batch.query), batch.query, *rest, schedule=other)
    longer = Schedule(schedule.tiles, 3, 2, 1, schedule.tuning)
    with pytest.raises(ValueError, match="the schedule is for 3 queries in groups of 2 heads"):
        sparse_attention(torch.empty_like(batch.query), batch.query, *rest, schedule=longer)
    behind = plan(batch.query, shape.keys, *places, flash=True, common_tiles=0)
    with pytest.raises(ValueError, match="for layers without a window, not 7 tokens"):
        sparse_attention(batch.query.clone(), batch.query, *rest, schedule=behind, window=7)
