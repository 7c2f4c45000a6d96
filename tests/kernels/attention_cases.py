# SPDX-License-Identifier: Apache-2.0
"""Paged caches and queries for attention and scores, and how far from the truth they may be."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.align_cases import Shape
from tests.kernels.triton_running import DEVICE


@dataclass
class Batch:
    """Queries of several requests over one layer's cache.

    What the queries may not see is NaN, so that it shows wherever it is read.

    Attributes:
        query: `[queries, heads, head_size]`.
        pages: `[num_blocks, page_elements]`.
        block_tables: int32 `[requests, blocks]`; blocks that are not needed do not exist.
        request, positions: int64 `[queries]`.
        scale: softmax scale, times that of keys.
        value_scale: what values are multiplied by.
    """

    query: torch.Tensor
    pages: torch.Tensor
    block_tables: torch.Tensor
    request: torch.Tensor
    positions: torch.Tensor
    scale: float
    value_scale: float = 1.0


def make_batch(
    shape: Shape,
    group: int,
    positions: list[list[int]],
    dtype: torch.dtype,
    device: str = DEVICE,
    stored: torch.dtype | None = None,
) -> Batch:
    """Random numbers for queries at the given positions of each request.

    Args:
        dtype: of queries.
        stored: of pages; None: the same. Only where it is another, keys and values have scales.
    """
    heads, block_size, head_size = shape.keys.shape
    filled = [max(places, default=-1) + 1 for places in positions]
    widest = max(-(-count // block_size) for count in filled) + 1
    used = sum(-(-count // block_size) for count in filled)
    ids = iter(torch.randperm(used + 2).tolist())
    pages = torch.full(
        (used + 2, shape.page_elements), float("nan"), dtype=dtype if stored is None else stored
    )
    tables = torch.full((len(filled), widest), 1 << 30, dtype=torch.int32)
    for row, count in enumerate(filled):
        for block in range(-(-count // block_size)):
            tables[row, block] = page = next(ids)
            tokens = min(block_size, count - block * block_size)
            for part in (shape.keys, shape.values):
                assert part is not None
                view = part.view(pages[page : page + 1]).permute(0, 2, 3, 1, 4, 5)[0]
                numbers = torch.randn(block_size, *view.shape[2:])
                numbers[tokens:] = float("nan")
                view.copy_(numbers.to(pages.dtype).view_as(view))
    request = [row for row, places in enumerate(positions) for _ in places]
    return Batch(
        torch.randn(len(request), heads * group, head_size).to(dtype).to(device),
        pages.to(device),
        tables.to(device),
        torch.tensor(request, device=device),
        torch.tensor([place for places in positions for place in places], device=device),
        head_size**-0.5 * (1.0 if stored is None else 0.7),
        1.0 if stored is None else 0.3,
    )


WINDOWS = (1, 2, 16, 100, 127, 128, 129, 300, 10_000)
"""In keys: on both sides of a chunk of the C++ kernels, and beyond all queries."""


def softmaxes(heads: int) -> dict[str, dict[str, Any]]:
    """Arguments of attention that change which logits there are, and what they are.

    Sinks are from negligible to overwhelming.
    """
    sinks = torch.linspace(-4, 6, heads)
    return {
        **{f"window of {window}": {"window": window} for window in WINDOWS},
        "sinks": {"sinks": sinks},
        "sinks in bf16": {"sinks": sinks.bfloat16()},
        "cap": {"soft_cap": 0.7},
        "all": {"window": 40, "sinks": sinks, "soft_cap": 1.5},
    }


SOFTMAXES = tuple(softmaxes(1))


def weights_in_float64(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    first_head: int,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Of one query, head by head.

    Args:
        query: `[heads, head_size]`, of one KV head.
        key: `[tokens, head_size]`, up to the query's own.
        first_head: of `query`, among all.

    Returns:
        `[heads, tokens]`.
    """
    weights = torch.zeros(len(query), len(key), dtype=torch.float64)
    first = max(0, len(key) - window) if window else 0
    for head, own in enumerate(query.double()):
        logits = [float(own @ each) * scale for each in key[first:].double()]
        if soft_cap:
            logits = [soft_cap * math.tanh(logit / soft_cap) for logit in logits]
        sink = [] if sinks is None else [float(sinks[first_head + head])]
        largest = max(logits + sink)
        exponentials = [math.exp(logit - largest) for logit in logits + sink]
        shares = torch.tensor(exponentials, dtype=torch.float64) / math.fsum(exponentials)
        weights[head, first:] = shares[: len(logits)]
    return weights


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype
) -> None:
    """At most twice as far from what float32 gives as torch in the same dtype.

    Args:
        found: what the kernel gave.
        expected: the reference, in float32.
        plain: the same in torch, with every step in `dtype`.
        dtype: of queries and pages.
    """
    assert not found.isnan().any()
    error = (found.float() - expected).abs().max()
    # float32 is as exact as the truth it is compared with: what sums in another order may differ.
    rounding = 32 * torch.finfo(torch.float32).eps * expected.abs().max()
    allowed = rounding if dtype == torch.float32 else 2 * (plain.float() - expected).abs().max()
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def varlen_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    block_table: torch.Tensor,
    return_softmax_lse: bool,
    fa_version: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `flash_attn_varlen_func` as `flash_attention` calls it, in plain torch; what it does
    not define is NaN."""
    assert (causal, return_softmax_lse, fa_version) == (False, True, 3)
    out = torch.full_like(q, float("nan"))
    lse = torch.full((q.shape[1], len(q)), float("nan"), device=q.device)
    group = q.shape[1] // k.shape[2]
    bounds = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        mine = slice(bounds[row], bounds[row + 1])
        assert mine.stop - mine.start <= max_seqlen_q
        assert length <= max_seqlen_k
        if not length:
            continue
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        key, value = (
            part[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
            for part in (k, v)
        )
        logits = torch.einsum("qhd,khd->hqk", q[mine].float(), key) * softmax_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        lse[:, mine] = logits.logsumexp(-1)
        out[mine] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).to(q.dtype)
    return out, lse
