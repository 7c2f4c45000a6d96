# SPDX-License-Identifier: Apache-2.0
"""The Triton `token_scores` is as exact as torch, reads nothing that it may not see, and gives the
same every time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import Shape, channel_tiles, hnd, nhd, shape_of
from tests.kernels.attention_cases import Batch, assert_close, make_batch, softmaxes
from tests.kernels.triton_running import DEVICE, require_triton
from tests.prefill.pages import LAYOUTS
from vllm_segreuse.kernels import reference

require_triton()

from vllm_segreuse.kernels.triton_schedule import Tuning  # noqa: E402
from vllm_segreuse.kernels.triton_scores import token_scores  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = [0, 3, 40, 41, *range(60, 70), 130]
SMALL = Tuning(16, 16, 4, 2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def run(
    batch: Batch,
    shape: Shape,
    num_tokens: int,
    splits: int | None = None,
    tuning: Tuning | None = None,
    highest: bool = False,
) -> torch.Tensor:
    inputs = batch.query, batch.positions, batch.pages, shape.keys, batch.block_tables[0]
    return token_scores(*inputs, num_tokens, batch.scale, highest, splits=splits, tuning=tuning)


def check(
    batch: Batch,
    shape: Shape,
    num_tokens: int,
    splits: int | None = None,
    tuning: Tuning | None = None,
) -> None:
    for highest in (False, True):
        scores = run(batch, shape, num_tokens, splits, tuning, highest)
        table = batch.block_tables[0]
        expected = reference.token_scores(
            batch.query.float(),
            batch.positions,
            batch.pages.float(),
            shape.keys,
            table,
            num_tokens,
            batch.scale,
            highest,
        )
        plain = in_plain_torch(batch, shape, num_tokens, highest)
        assert scores.dtype == torch.float32
        assert_close(scores, expected, plain, batch.query.dtype)
        if not highest:  # every row of weights sums to one
            assert scores.sum().item() == pytest.approx(batch.query.shape[:2].numel(), rel=1e-5)


def in_plain_torch(
    batch: Batch, shape: Shape, num_tokens: int, highest: bool = False
) -> torch.Tensor:
    """Every step in the dtype of the queries."""
    heads, size, channels = shape.keys.shape
    pages = batch.pages[batch.block_tables[0, : -(-num_tokens // size)].long()]
    key = shape.keys.tokens(pages)[:num_tokens].permute(1, 2, 0).to(batch.query.dtype)
    query = batch.query.view(len(batch.query), heads, -1, channels).transpose(0, 1)
    logits = query.flatten(1, 2) @ key * batch.scale
    tokens = torch.arange(num_tokens, device=key.device)
    hidden = tokens > batch.positions.repeat_interleave(query.shape[2])[:, None]
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights.amax((0, 1)) if highest else weights.sum((0, 1))


@pytest.mark.parametrize(("dtype", "splits"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_the_smallest(dtype: torch.dtype, splits: int) -> None:
    """Two KV heads of three query heads, tiles of five queries, channels that are no power of two;
    queries on both sides of a step's and a page's border, and more than a tile holds."""
    shape = channel_tiles(2, 8, 24, 8)
    places = [0, 15, 16, 17, 31, 32, 33]
    check(make_batch(shape, 3, [places], dtype), shape, 34, splits, SMALL)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("softmax", ["sinks", "sinks in bf16", "cap"])
def test_the_smallest_with_sinks_and_caps(softmax: str, splits: int) -> None:
    """A sink takes its share once, however many splits there are."""
    shape = shape_of("tiled by 16")
    batch = make_batch(shape, 2, [[0, 15, 16, 40, 90]], torch.float32)
    given = softmaxes(batch.query.shape[1])[softmax]
    given = {name: each.to(DEVICE) if name == "sinks" else each for name, each in given.items()}
    inputs = batch.query, batch.positions, batch.pages, shape.keys, batch.block_tables[0], 91
    for highest in (False, True):
        found = token_scores(*inputs, batch.scale, highest, splits=splits, tuning=SMALL, **given)
        expected = reference.token_scores(*inputs, batch.scale, highest, **given)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("last", [0, 1, 4, 7, 20])
def test_the_smallest_with_the_last_queries_once_more(last: int, splits: int) -> None:
    """Tiles of five queries: the last begin within one."""
    shape = channel_tiles(2, 8, 24, 8)
    batch = make_batch(shape, 3, [[0, 15, 16, 17, 31, 32, 33]], torch.float32)
    inputs = batch.query, batch.positions, batch.pages, shape.keys, batch.block_tables[0], 34
    given = {"splits": splits, "tuning": SMALL}
    found = token_scores(*inputs, batch.scale, last=last, **given)
    expected = reference.token_scores(*inputs, batch.scale, last=last)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(found[0], token_scores(*inputs, batch.scale, **given))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_smallest_with_keys_in_fp8(stored: torch.dtype) -> None:
    shape = channel_tiles(2, 8, 24, 8)
    places = [0, 15, 16, 17, 31, 32, 33]
    for dtype in DTYPES:
        check(make_batch(shape, 3, [places], dtype, stored=stored), shape, 34, 2, SMALL)


def test_the_smallest_with_fewer_keys_than_queries_see() -> None:
    shape = nhd(1, 16, 16)
    check(make_batch(shape, 1, [[3, 20, 40]], torch.float32), shape, 18, 2, SMALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("group", "head_size"), [(1, 32), (3, 80), (4, 256)])
def test_dtypes_groups_and_head_sizes(
    dtype: torch.dtype, splits: int, group: int, head_size: int
) -> None:
    shape = nhd(2, 16, head_size)
    check(make_batch(shape, group, [PLACES], dtype), shape, 131, splits)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    shape = shape_of(name)
    check(make_batch(shape, 2, [[5, 63, 64, 80]], torch.bfloat16), shape, 81)


@pytest.mark.parametrize(
    "shape", [hnd(3, 8, 64), nhd(2, 24, 48), channel_tiles(2, 16, 64, 16)], ids=["8", "24", "tiles"]
)
def test_pages(shape: Shape) -> None:
    check(make_batch(shape, 2, [[7, 8, 24, 90]], torch.float16), shape, 91)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("place", [0, 14, 15, 16, 29, 30, 31, 32, 33])
def test_edges_of_pages_and_steps(place: int, splits: int) -> None:
    """Steps of 16 keys: a query alone, the first of its tile, and between others."""
    shape = nhd(1, 16, 32)
    first = [place, place + 1, place + 20]
    for places in ([place], first, sorted({0, *first, 60})):
        batch = make_batch(shape, 2, [places], torch.bfloat16)
        check(batch, shape, places[-1] + 1, splits, SMALL)


@pytest.mark.parametrize("splits", [1, 2])
def test_every_position_in_a_tile_of_its_own(splits: int) -> None:
    """Wherever a tile needs a mask, it alone does."""
    shape = nhd(1, 16, 32)
    check(make_batch(shape, 16, [list(range(50))], torch.bfloat16), shape, 50, splits, SMALL)


@pytest.mark.parametrize("count", [1, 4, 5, 6, 11])
def test_queries_need_not_fill_their_tiles(count: int) -> None:
    """Five queries in groups of three heads fit in a tile of 16 rows."""
    shape = hnd(2, 16, 32)
    batch = make_batch(shape, 3, [list(range(20, 20 + count))], torch.float32)
    check(batch, shape, 20 + count, tuning=SMALL)


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 130])
def test_keys_beyond_those_asked_for_do_not_count(num_tokens: int) -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [PLACES], torch.float32)
    for splits in (1, 2):
        check(batch, shape, num_tokens, splits)


def test_the_smallest_of_keys_that_no_query_sees_have_no_score() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3, 20, 90]], torch.float32)
    early = replace(batch, query=batch.query[:2], positions=batch.positions[:2])
    mass = run(early, shape, 91, tuning=SMALL)
    assert (mass[:21] > 0).all()
    assert (mass[21:] == 0).all()


def test_large_logits_do_not_overflow() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3, 70]], torch.float16)
    batch = replace(batch, query=100 * batch.query)
    check(batch, shape, 71, 2)


@pytest.mark.parametrize("splits", [1, 2])
def test_the_same_every_time(splits: int) -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [PLACES], torch.bfloat16)
    assert torch.equal(run(batch, shape, 131, splits), run(batch, shape, 131, splits))


@settings(max_examples=5)
@given(st.data())
def test_random_queries(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([nhd, hnd]))
    shape = make(data.draw(st.integers(1, 2)), data.draw(st.sampled_from([8, 16])), 32)
    places = sorted(data.draw(st.sets(st.integers(0, 120), min_size=1, max_size=12)))
    num_tokens = data.draw(st.integers(1, places[-1] + 1))
    group, splits = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    batch = make_batch(shape, group, [places], torch.float32)
    check(batch, shape, num_tokens, splits, SMALL)


def test_nothing_to_score() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3]], torch.float32)
    none = replace(batch, query=batch.query[:0], positions=batch.positions[:0])
    for tokens, of in ((4, none), (0, batch), (0, none)):
        found = run(of, shape, tokens).cpu()
        assert torch.equal(found, torch.zeros(tokens))
        assert found.dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    shape = nhd(2, 16, 32)
    batch = make_batch(shape, 2, [[3, 20]], torch.float16)
    with pytest.raises(ValueError, match=r"query is torch.float16 .* pages are torch.float32"):
        run(replace(batch, pages=batch.pages.float()), shape, 21)
    with pytest.raises(ValueError, match="a multiple of 2 KV heads"):
        run(replace(batch, query=batch.query[:, :3]), shape, 21)
    with pytest.raises(ValueError, match=r"positions must be contiguous torch\.int64"):
        run(replace(batch, positions=batch.positions.int()), shape, 21)
    with pytest.raises(ValueError, match="block_ids has 3 entries; the tokens fill 4 pages"):
        run(batch, shape, 49)
    with pytest.raises(ValueError, match="num_tokens is -1; expected 0 or more"):
        run(batch, shape, -1)
    many = replace(batch, query=batch.query.repeat(1, 16, 1))
    with pytest.raises(ValueError, match="tiles of 16 rows cannot hold 32 heads"):
        run(many, shape, 21, tuning=SMALL)
