# SPDX-License-Identifier: Apache-2.0
"""What the kernels are measured by agrees with float64, query by query. `align` is tested where it
is used, in tests/prefill/test_align.py."""

import math

import pytest
import torch

from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import TiledStrides

BLOCK_SIZE = 16


def paged(tokens: torch.Tensor) -> tuple[torch.Tensor, TiledStrides, torch.Tensor]:
    """Tokens `[tokens, heads, size]` in pages, in an order of their own: pages, strides, blocks."""
    count, heads, size = tokens.shape
    blocks = torch.randperm(-(-count // BLOCK_SIZE))
    pages = torch.full((len(blocks), BLOCK_SIZE * heads * size), float("nan"), dtype=tokens.dtype)
    for position, token in enumerate(tokens):
        row = pages[blocks[position // BLOCK_SIZE]].view(BLOCK_SIZE, heads, size)
        row[position % BLOCK_SIZE] = token
    strides = TiledStrides(
        (heads, BLOCK_SIZE, size), 0, size, BLOCK_SIZE, 0, heads * size, size, 0, 1
    )
    return pages, strides, blocks


def mass_of(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    highest: bool = False,
    last: int | None = None,
) -> torch.Tensor:
    """`token_scores` of keys that lie in pages."""
    pages, strides, blocks = paged(keys)
    where = pages, strides, blocks, len(keys)
    return reference.token_scores(queries, positions, *where, scale, highest, last=last)


def dense_mass(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    highest: bool = False,
) -> torch.Tensor:
    """Query by query and head by head, in float64."""
    num_tokens, kv_heads, _ = keys.shape
    groups = queries.shape[1] // kv_heads
    mass = torch.zeros(num_tokens, dtype=torch.float64)
    for query, position in zip(queries.double(), positions.tolist(), strict=True):
        for head in range(queries.shape[1]):
            seen = keys[: position + 1, head // groups].double()
            weights = torch.softmax(seen @ query[head] * scale, dim=0)
            so_far = mass[: position + 1]
            mass[: position + 1] = torch.maximum(so_far, weights) if highest else so_far + weights
    return mass


@pytest.mark.parametrize("block", [1 << 24, 4000, 1], ids=["one block", "blocks", "one by one"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("highest", [False, True], ids=["sum", "peak"])
def test_scores_are_those_of_a_dense_softmax(
    heads: int, kv_heads: int, block: int, highest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_SCORE_ELEMENTS", block)
    num_tokens, size = 150, 16
    positions = torch.tensor([0, 1, 2, 40, 41, 77, 100, 148, 149])
    queries, keys = torch.randn(9, heads, size), torch.randn(num_tokens, kv_heads, size)
    scale = 1 / math.sqrt(size)
    mass = mass_of(queries, positions, keys, scale, highest)
    assert mass.dtype == torch.float32
    expected = dense_mass(queries, positions, keys, scale, highest)
    torch.testing.assert_close(mass.double(), expected, atol=1e-5, rtol=1e-5)
    if not highest:
        assert float(mass.sum()) == pytest.approx(len(positions) * heads, rel=1e-5)


@pytest.mark.parametrize("block", [1 << 24, 4000, 1], ids=["one block", "blocks", "one by one"])
@pytest.mark.parametrize("last", [0, 1, 4, 9, 20])
def test_the_last_queries_are_summed_up_once_more(
    last: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_SCORE_ELEMENTS", block)
    positions = torch.tensor([0, 1, 2, 40, 41, 77, 100, 148, 149])
    queries, keys = torch.randn(9, 6, 16), torch.randn(150, 2, 16)
    every, late = mass_of(queries, positions, keys, 0.25, last=last)
    expected = dense_mass(queries, positions, keys, 0.25)
    torch.testing.assert_close(every.double(), expected, atol=1e-5, rtol=1e-5)
    own = slice(max(0, 9 - last), None)
    expected = dense_mass(queries[own], positions[own], keys, 0.25)
    torch.testing.assert_close(late.double(), expected, atol=1e-5, rtol=1e-5)


def test_no_query_pays_attention_to_the_future() -> None:
    keys = torch.randn(50, 2, 8)
    mass = mass_of(torch.randn(3, 4, 8), torch.tensor([3, 10, 30]), keys, 1.0)
    assert (mass[31:] == 0).all()
    assert (mass[:31] > 0).all()


def test_large_logits_and_low_precision() -> None:
    queries, keys = 100 * torch.randn(4, 2, 8), torch.randn(20, 2, 8)
    positions = torch.arange(16, 20)
    mass = mass_of(queries.bfloat16(), positions, keys.bfloat16(), 1.0)
    expected = dense_mass(queries.bfloat16(), positions, keys.bfloat16(), 1.0)
    torch.testing.assert_close(mass.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_attention_is_that_of_a_dense_softmax(heads: int, kv_heads: int) -> None:
    size, positions = 16, torch.tensor([0, 1, 15, 16, 40, 99])
    queries = torch.randn(len(positions), heads, size)
    keys, values = torch.randn(2, 100, kv_heads, size)
    pages, strides, blocks = paged(torch.cat([keys, values], dim=1))
    whole = (2 * kv_heads, BLOCK_SIZE, size)
    assert strides.shape == whole
    half = [
        TiledStrides(
            (kv_heads, BLOCK_SIZE, size),
            offset * size,
            strides.head,
            *(strides.token_tile, strides.token_hi, strides.token_lo),
            *(strides.channel_tile, strides.channel_hi, strides.channel_lo),
        )
        for offset in (0, kv_heads)
    ]
    out = torch.empty_like(queries)
    reference.sparse_attention(
        out,
        queries,
        pages,
        half[0],
        half[1],
        blocks.int()[None],
        torch.zeros(len(positions), dtype=torch.int64),
        positions,
        0.3,
    )
    for i, position in enumerate(positions.tolist()):
        for head in range(heads):
            seen = keys[: position + 1, head * kv_heads // heads].double()
            weights = torch.softmax(seen @ queries[i, head].double() * 0.3, dim=0)
            expected = weights @ values[: position + 1, head * kv_heads // heads].double()
            torch.testing.assert_close(out[i, head].double(), expected, atol=1e-5, rtol=0)
