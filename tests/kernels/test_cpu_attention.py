# SPDX-License-Identifier: Apache-2.0
"""The C++ attention and scores, for every instruction set this machine has, against float64.

What queries may not see is NaN (`make_batch`): reading it shows.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import Shape, channel_tiles, hnd, nhd, shape_of
from tests.kernels.attention_cases import (
    SOFTMAXES,
    Batch,
    make_batch,
    softmaxes,
    weights_in_float64,
)
from vllm_segreuse.kernels import cpu, reference
from vllm_segreuse.kernels.pages import TiledStrides

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = {
    **{name: shape_of(name) for name in ("HND", "NHD", "tiled by 32", "tiled by 16", "pairs")},
    **{name: shape_of(name) for name in ("K beside V", "K and V interleaved")},
    "pages of 24": nhd(2, 24, 48),
    "channel tiles": channel_tiles(2, 16, 64, 16),
}
# Positions of each request: chunks are 128 keys, tiles 112 rows of queries and heads.
CASES = {
    "one at the start": [[0]],
    "one far out": [[700]],
    "two requests": [[0, 5, 63, 64, 65], [1, 127, 128, 300, 767]],
    "edges of chunks": [[126], [127], [128], [255, 256, 257], [383, 384]],
    "more than a tile": [list(range(3, 463, 3))],
    "neighbours": [list(range(100)), [], list(range(40, 170))],
}
GROUPS = (1, 2, 5)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def run(batch: Batch, shape: Shape, **softmax: Any) -> torch.Tensor:
    """What the kernel gives; NaN where it writes nothing."""
    assert shape.values is not None
    out = torch.full_like(batch.query, float("nan"))
    where = batch.block_tables, batch.request, batch.positions, batch.scale
    keys, values = shape.keys, shape.values
    scaled = {"value_scale": batch.value_scale, **softmax}
    cpu.sparse_attention(out, batch.query, batch.pages, keys, values, *where, **scaled)
    return out


def in_float64(batch: Batch, shape: Shape) -> torch.Tensor:
    """`[queries, heads, size]`, query by query."""
    assert shape.values is not None
    kv_heads, block_size, size = shape.keys.shape
    out = torch.zeros(batch.query.shape, dtype=torch.float64)
    for i, (row, place) in enumerate(
        zip(batch.request.tolist(), batch.positions.tolist(), strict=True)
    ):
        pages = batch.pages[batch.block_tables[row, : place // block_size + 1].long()]
        key, value = (
            part.tokens(pages)[: place + 1].double().transpose(0, 1)
            for part in (shape.keys, shape.values)
        )
        query = batch.query[i].double().view(kv_heads, -1, size)
        weights = (query @ key.transpose(1, 2) * batch.scale).softmax(-1)
        out[i] = (weights @ value * batch.value_scale).flatten(0, 1)
    return out


def head_by_head(batch: Batch, shape: Shape, softmax: dict[str, Any]) -> torch.Tensor:
    """The same, by `weights_in_float64`."""
    assert shape.values is not None
    kv_heads, block_size, _ = shape.keys.shape
    group = batch.query.shape[1] // kv_heads
    out = torch.zeros(batch.query.shape, dtype=torch.float64)
    where = zip(batch.request.tolist(), batch.positions.tolist(), strict=True)
    for i, (row, place) in enumerate(where):
        pages = batch.pages[batch.block_tables[row, : place // block_size + 1].long()]
        key, value = (p.tokens(pages)[: place + 1] for p in (shape.keys, shape.values))
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            args = batch.query[i, mine], key[:, head], batch.scale, head * group
            out[i, mine] = weights_in_float64(*args, **softmax) @ value[:, head].double()
    return out


def check(batch: Batch, shape: Shape, expected: torch.Tensor | None = None, **softmax: Any) -> None:
    """float32 inside, and one rounding at the end; the matrix unit rounds weights, too."""
    out = run(batch, shape, **softmax)
    expected = in_float64(batch, shape) if expected is None else expected
    error = (out.double() - expected).abs()
    allowed = 1e-5 + torch.finfo(batch.query.dtype).eps * expected.abs().amax(-1, keepdim=True)
    assert (error <= allowed).all(), float((error - allowed).max())


# Each layout with each kind of positions; group sizes and dtypes by turns, in every pair.
SAMPLE = [
    (layout, case, GROUPS[(i + j) % 3], DTYPES[(i + 2 * j) % 3])
    for i, layout in enumerate(SHAPES)
    for j, case in enumerate(CASES)
]


def test_the_sample_has_every_pair() -> None:
    for one, other in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        values = [len({row[column] for row in SAMPLE}) for column in (one, other)]
        assert len({(row[one], row[other]) for row in SAMPLE}) == math.prod(values)


@pytest.mark.parametrize(("layout", "case", "group", "dtype"), SAMPLE)
def test_scattered_queries_attend_to_their_past(
    built: str, layout: str, case: str, group: int, dtype: torch.dtype
) -> None:
    shape = SHAPES[layout]
    check(make_batch(shape, group, CASES[case], dtype, "cpu"), shape)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize(
    ("layout", "group", "dtype"),
    [("tiled by 32", 2, torch.float32), ("pairs", 5, torch.bfloat16), ("NHD", 1, torch.float16)],
)
def test_windows_sinks_and_caps(
    built: str, layout: str, group: int, dtype: torch.dtype, softmax: str
) -> None:
    """Queries far apart and side by side in one tile; some chunks are seen by none of them."""
    shape = SHAPES[layout]
    places = [[0, 1, 15, 126, 127, 128, 129, 130, 700, 701], [*range(250, 262), 400]]
    batch = make_batch(shape, group, places, dtype, "cpu")
    given = softmaxes(batch.query.shape[1])[softmax]
    check(batch, shape, head_by_head(batch, shape, given), **given)


def test_keys_before_all_windows_are_not_read(built: str) -> None:
    shape = SHAPES["HND"]
    batch = make_batch(shape, 2, [[600, 610, 650]], torch.float32, "cpu")
    whole = run(batch, shape, window=60)
    gone = 512 // shape.keys.shape[1]  # the first window begins in the chunk behind
    batch.pages[batch.block_tables[0, :gone].long()] = float("nan")
    assert torch.equal(run(batch, shape, window=60), whole)


@pytest.mark.parametrize("stored", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["HND", "tiled by 32", "pairs"])
def test_pages_may_be_fp8(built: str, layout: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    shape, places = SHAPES[layout], [[0, 5, 63, 64, 65], [1, 127, 128, 300, 767]]
    check(make_batch(shape, 2, places, dtype, "cpu", stored), shape)


@pytest.mark.parametrize("stored", FP8, ids=str)
def test_every_finite_number_of_fp8_is_read(built: str, stored: torch.dtype) -> None:
    """One key each, so that its value is the answer."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    numbers = codes.float()[codes.float().isfinite()]
    shape = hnd(1, 16, 16)
    count = -(-len(numbers) // 16)
    pages = torch.zeros(count, shape.page_elements, dtype=stored)
    padded = torch.cat([numbers, numbers.new_zeros(16 * count - len(numbers))]).view(count, 16)
    assert shape.values is not None
    shape.values.view(pages)[:, 0, 0, 0, 0] = padded.to(stored)
    tables = torch.arange(count, dtype=torch.int32)[:, None]
    request, positions = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    out = torch.zeros(count, 1, 16)
    cpu.sparse_attention(
        out, out.clone(), pages, shape.keys, shape.values, tables, request, positions, 1.0
    )
    assert torch.equal(out[:, 0], padded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_heads_than_a_tile_has_rows(built: str, dtype: torch.dtype) -> None:
    shape = hnd(2, 16, 16)
    check(make_batch(shape, 120, [[3], [40, 130]], dtype, "cpu"), shape)


@pytest.mark.parametrize("size", [16, 48, 80, 128, 256])
def test_head_sizes(built: str, size: int) -> None:
    """Keys by channel, as vLLM's CPU backend has them, values by token."""
    keys = TiledStrides((1, 32, size), 0, 0, 32, 0, 1, size, 0, 32)
    values = TiledStrides((1, 32, size), 32 * size, 0, 32, 0, size, size, 0, 1)
    shape = Shape(64 * size, keys, values)
    check(make_batch(shape, 2, [[0, 50, 127, 130]], torch.float32, "cpu"), shape)


def test_large_logits_do_not_overflow(built: str) -> None:
    shape = SHAPES["tiled by 32"]
    batch = make_batch(shape, 1, [[300, 301], [40]], torch.float32, "cpu")
    batch.query *= 1000
    out, expected = run(batch, shape), in_float64(batch, shape)
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("growth", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_may_grow_along_the_keys(built: str, dtype: torch.dtype, growth: float) -> None:
    """By so much in a chunk: the softmax has a new peak now and then, or in each of them."""
    shape = SHAPES["pairs"]
    batch = make_batch(shape, 2, [[899, 900]], dtype, "cpu")
    block_size, size = shape.keys.shape[1:]
    batch.query.zero_()[..., 0] = size**0.5
    for index, block in enumerate(batch.block_tables[0, : -(-901 // block_size)].tolist()):
        keys = shape.keys.view(batch.pages[block : block + 1])
        logits = growth / 128 * (index * block_size + torch.arange(block_size))
        keys[..., 0, 0] = logits.view(1, 1, *keys.shape[2:4]).to(dtype)
    out, expected = run(batch, shape), in_float64(batch, shape)
    exact = dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-5 if exact else 2e-2, rtol=0)


def test_one_request_does_not_see_what_another_has(built: str) -> None:
    """Neither do buffers carry it over: NaN times a weight of nought is NaN."""
    shape = SHAPES["tiled by 32"]
    batch = make_batch(shape, 2, [[500], [3, 70], [130], [9]], torch.float32, "cpu")
    batch.pages[batch.block_tables[0, :8].long()] = float("nan")
    out = run(batch, shape)
    assert out[0].isnan().all()
    torch.testing.assert_close(
        out[1:].double(), in_float64(batch, shape)[1:], atol=1e-5, rtol=0, equal_nan=False
    )


def test_attention_is_the_same_with_any_number_of_threads(built: str, threads: int) -> None:
    """More tiles than threads, of every length."""
    shape = SHAPES["HND"]
    places = [list(range(n, 300, 7)) for n in range(0, 200, 20)]
    batch = make_batch(shape, 3, places, torch.bfloat16, "cpu")
    check(batch, shape)
    assert torch.equal(run(batch, shape), run(batch, shape))


@pytest.mark.parametrize("highest", [False, True], ids=["sum", "peak"])
@pytest.mark.parametrize("softmax", ["sinks", "sinks in bf16", "cap"])
@pytest.mark.parametrize(("layout", "dtype"), [("HND", torch.float32), ("pairs", torch.bfloat16)])
def test_scores_with_sinks_and_caps(
    built: str, layout: str, dtype: torch.dtype, softmax: str, highest: bool
) -> None:
    """A sink takes its share of the attention, once for each query and head."""
    shape = SHAPES[layout]
    batch = make_batch(shape, 2, [[0, 5, 127, 128, 300]], dtype, "cpu")
    heads = batch.query.shape[1]
    given = softmaxes(heads)[softmax]
    args = (batch.positions, batch.pages, shape.keys, batch.block_tables[0], 301, batch.scale)
    scores = cpu.token_scores(batch.query, *args, highest, **given)
    pages = batch.pages[batch.block_tables[0, : 300 // shape.keys.shape[1] + 1].long()]
    key, expected = shape.keys.tokens(pages), torch.zeros(301, dtype=torch.float64)
    for query, place in zip(batch.query, batch.positions.tolist(), strict=True):
        for head in range(heads):
            own = key[: place + 1, head // 2], batch.scale, head
            weights = weights_in_float64(query[head : head + 1], *own, **given)[0]
            so_far = expected[: place + 1]
            expected[: place + 1] = torch.maximum(so_far, weights) if highest else so_far + weights
    torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=2e-5)


def scores_of(
    batch: Batch, shape: Shape, num_tokens: int, highest: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives, and the truth in float64."""
    args = (batch.positions, batch.pages, shape.keys, batch.block_tables[0], num_tokens)
    scores = cpu.token_scores(batch.query, *args, batch.scale, highest)
    used = batch.block_tables[0, : -(-num_tokens // shape.keys.shape[1])].long()
    key = shape.keys.tokens(batch.pages[used])[:num_tokens].double()
    key = key.repeat_interleave(batch.query.shape[1] // key.shape[1], 1)
    logits = torch.einsum("qhd,thd->qht", batch.query.double(), key.nan_to_num()) * batch.scale
    hidden = torch.arange(num_tokens) > batch.positions[:, None, None]
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return scores, weights.amax((0, 1)) if highest else weights.sum((0, 1))


EVERY_LAYOUT = pytest.mark.parametrize(
    ("layout", "dtype", "group"),
    [
        ("HND", torch.float32, 3),
        ("NHD", torch.bfloat16, 1),
        ("tiled by 32", torch.bfloat16, 2),
        ("tiled by 16", torch.float16, 1),
        ("pairs", torch.bfloat16, 3),
        ("K and V interleaved", torch.float32, 2),
        ("channel tiles", torch.float16, 1),
    ],
)


@pytest.mark.parametrize("highest", [False, True], ids=["sum", "peak"])
@EVERY_LAYOUT
@pytest.mark.parametrize("count", [1, 9, 200])
def test_scores_are_those_of_a_dense_softmax(
    built: str, layout: str, dtype: torch.dtype, group: int, count: int, highest: bool
) -> None:
    """Some queries at edges of chunks; keys that no query sees have no score."""
    shape, edges = SHAPES[layout], {0, 127, 128, 256, 383} if count > 1 else set()
    places = sorted(edges | set(torch.randperm(600)[: count - len(edges)].tolist()))
    batch = make_batch(shape, group, [places], dtype, "cpu")
    seen = places[-1] + 1
    scores, expected = scores_of(batch, shape, seen, highest)
    torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=2e-5)
    filled = batch.block_tables.shape[1] - 1
    longer = cpu.token_scores(
        *(batch.query, batch.positions, batch.pages, shape.keys),
        *(batch.block_tables[0, :filled], seen + 9, batch.scale, highest),
    )
    assert torch.equal(longer[:seen], scores)
    assert not longer[seen:].any()
    if not highest:
        assert float(scores.sum()) == pytest.approx(batch.query.shape[:2].numel(), rel=1e-4)


@pytest.mark.parametrize("last", [0, 1, 4, 67, 300])
@EVERY_LAYOUT
def test_the_last_queries_are_summed_up_once_more(
    built: str, layout: str, dtype: torch.dtype, group: int, last: int
) -> None:
    """Also where they begin within a tile; the sum over all is to the last bit what it is alone."""
    shape, places = SHAPES[layout], sorted(torch.randperm(600)[:200].tolist())
    batch = make_batch(shape, group, [places], dtype, "cpu")
    own = slice(max(0, 200 - last), None)
    few = replace(batch, query=batch.query[own], positions=batch.positions[own])
    seen = places[-1] + 1
    found = cpu.token_scores(
        *(batch.query, batch.positions, batch.pages, shape.keys, batch.block_tables[0]),
        *(seen + 9, batch.scale),
        last=last,
    )
    every, _ = scores_of(batch, shape, seen)
    assert torch.equal(found[0, :seen], every)
    expected = torch.zeros(seen).double() if not last else scores_of(few, shape, seen)[1]
    torch.testing.assert_close(found[1, :seen].double(), expected, atol=2e-5, rtol=2e-5)
    assert not found[:, seen:].any()


@pytest.mark.parametrize("stored", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_fp8_keys(built: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    shape = SHAPES["tiled by 32"]
    batch = make_batch(shape, 2, [[0, 127, 128, 130, 383]], dtype, "cpu", stored)
    for highest in (False, True):
        scores, expected = scores_of(batch, shape, 384, highest)
        torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129])
def test_scores_of_fewer_keys_than_queries_see(built: str, num_tokens: int) -> None:
    """They are shares of the attention to all keys that a query sees: the sum is less than one."""
    shape = SHAPES["HND"]
    batch = make_batch(shape, 2, [[130, 200, 300]], torch.float32, "cpu")
    args = (batch.query, batch.positions, batch.pages, shape.keys, batch.block_tables[0])
    few, all_of_them = (cpu.token_scores(*args, n, batch.scale) for n in (num_tokens, 301))
    torch.testing.assert_close(few, all_of_them[:num_tokens], atol=1e-6, rtol=1e-5)


def test_scores_are_the_same_with_any_number_of_threads(built: str, threads: int) -> None:
    shape = SHAPES["tiled by 32"]
    batch = make_batch(shape, 2, [list(range(400, 540))], torch.bfloat16, "cpu")
    scores, expected = scores_of(batch, shape, 540)
    torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=2e-5)
    cpu.load_library().omp_set_num_threads(1)
    assert torch.equal(scores_of(batch, shape, 540)[0], scores)


def test_weights_are_exact_to_the_last_digits(built: str) -> None:
    """One query, logits from 0 down to where weights vanish: 2e-6 of each, and then nothing."""
    shape = hnd(1, 64, 16)
    batch = make_batch(shape, 1, [[511]], torch.float32, "cpu")
    logits = torch.cat([torch.linspace(0, -8, 448), torch.linspace(-8, -200, 64)])
    keys = torch.zeros(512, 16)
    keys[:, 0] = logits
    for i, block in enumerate(batch.block_tables[0, :8].tolist()):
        shape.keys.view(batch.pages[block : block + 1]).copy_(
            keys[64 * i : 64 * i + 64].view(1, 1, 1, 64, 1, 16)
        )
    batch.query.zero_()[..., 0] = 1.0
    args = (batch.positions, batch.pages, shape.keys, batch.block_tables[0], 512, 1.0)
    scores, expected = cpu.token_scores(batch.query, *args), logits.double().softmax(0)
    error = (scores.double() / expected - 1).abs()
    assert error[:448].max() < 2e-6
    assert error[logits > -80].max() < 4e-5  # of products that large, float32 has no more digits
    assert (scores[logits < -90] == 0).all()


def test_what_the_kernel_cannot_do_is_refused() -> None:
    odd = TiledStrides((1, 32, 24), 0, 0, 32, 0, 1, 24, 0, 32)
    assert not cpu.supports_attention(odd, torch.float32)
    keys = SHAPES["HND"].keys
    assert not cpu.supports_attention(keys, torch.float8_e4m3fn), "queries in fp8"
    assert all(cpu.supports_attention(keys, stored, torch.float16) for stored in FP8)
    assert not cpu.supports_attention(keys, torch.bfloat16, torch.float32)
    assert all(cpu.supports_attention(SHAPES["HND"].keys, dtype) for dtype in DTYPES)
    query, positions = torch.randn(1, 1, 24), torch.tensor([0])
    with pytest.raises(ValueError, match=r"head size of 24; the .* multiples of 16"):
        cpu.token_scores(query, positions, torch.randn(1, 768), odd, torch.zeros(1).int(), 1, 1.0)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(built: str, scale: float) -> None:
    shape = SHAPES["HND"]
    batch = make_batch(shape, 2, [[3, 40]], torch.float32, "cpu")
    where = batch.query, batch.positions, batch.pages, shape.keys, batch.block_tables[0]
    with pytest.raises(ValueError, match=f"scale is {scale}; expected more than 0"):
        cpu.token_scores(*where, 41, scale)


def test_nothing_to_attend_or_score() -> None:
    shape = SHAPES["HND"]
    batch = make_batch(shape, 1, [[5]], torch.float32, "cpu")
    args = (batch.pages, shape.keys, batch.block_tables[0])
    assert not cpu.token_scores(batch.query[:0], batch.positions[:0], *args, 6, 1.0).any()
    assert cpu.token_scores(batch.query, batch.positions, *args, 0, 1.0).shape == (0,)


@pytest.mark.parametrize("softmax", [None, *SOFTMAXES])
def test_the_reference_gives_the_same(built: str, softmax: str | None) -> None:
    """By which the Triton kernels are measured."""
    shape = SHAPES["NHD"]
    batch = make_batch(shape, 2, [[3, 70, 130], [], [200]], torch.float32, "cpu")
    out = torch.full_like(batch.query, float("nan"))
    where = batch.block_tables, batch.request, batch.positions, batch.scale
    assert shape.values is not None
    given = {} if softmax is None else softmaxes(batch.query.shape[1])[softmax]
    keys, values = shape.keys, shape.values
    reference.sparse_attention(out, batch.query, batch.pages, keys, values, *where, **given)
    torch.testing.assert_close(out, run(batch, shape, **given), atol=1e-5, rtol=0)
    given.pop("window", None)
    args = (batch.query[:3], batch.positions[:3], batch.pages, keys, batch.block_tables[0], 131)
    for highest in (False, True):
        mine, other = (
            score(*args, batch.scale, highest, **given)
            for score in (cpu.token_scores, reference.token_scores)
        )
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
