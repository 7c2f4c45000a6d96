# SPDX-License-Identifier: Apache-2.0
"""The kernels in plain torch: what every other version is tested against, and what runs where
none of them could be built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.page_tokens import pick_tokens, read_tokens, write_tokens
from vllm_segreuse.kernels.pages import (
    Carried,
    Moves,
    Part,
    Rotation,
    TiledStrides,
    indexable,
)
from vllm_segreuse.kernels.reference_codecs import decoded

_SCORE_ELEMENTS = 1 << 24  # bound on one block of attention weights (64 MiB in float32)


def align(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    sources: Sequence[torch.Tensor] | None = None,
    codec: Codec = Codec.RAW,
) -> None:
    """Copy tokens from slot to slot, keys turned by each token's own distance (SparseX, 3.1).

    Every source is read before any target is written. Rotates in float32 and rounds once. fp8
    saturates; its scales do not matter: source and target share them, and a rotation is linear.

    Args:
        pages: flat pages `[num_blocks, page_elements]` of each layer, of one dtype and one layout.
        parts: the keys and the values of a page.
        moves: which tokens go where.
        sources: where tokens are read, if not in `pages`: flat pages of each layer that lie
            elsewhere, packed alike, `[rows, page_elements]`. `moves.sources` are slots of these.
        codec: how `sources` are stored; other than `RAW`, they are as `encode` writes them, and
            tokens are decoded, turned and then rounded once.
    """
    for layer, source in zip(pages, pages if sources is None else sources, strict=True):
        if codec is Codec.RAW:
            moved = [read_tokens(source, part.strides, moves.sources) for part in parts]
        else:
            moved = decoded(source, parts, layer.shape[1], codec, moves.sources)
        for part, tokens in zip(parts, moved, strict=True):
            if part.rotation is not None:
                tokens = rotate(
                    tokens, part.rotation, moves.cos[moves.angles], moves.sin[moves.angles]
                )
            write_tokens(layer, part.strides, moves.targets, tokens.to(layer.dtype))


def store(
    pages: Sequence[torch.Tensor],
    cells: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Copy whole pages, bit for bit, to where `align` can read them as `sources`.

    Args:
        pages: flat pages `[num_blocks, page_elements]` of each layer, of one dtype and one layout.
        cells: where each layer's are stored, `[rows, page_elements]` of the same dtype.
        blocks: which pages, int64 `[blocks]`.
        rows: where each is stored, int64 `[blocks]`; none twice.
    """
    for layer, cell in zip(pages, cells, strict=True):
        indexable(cell)[rows] = indexable(layer)[blocks]


def carry(
    pages: torch.Tensor,
    parts: Sequence[Part],
    before: Sequence[torch.Tensor],
    carried: Carried,
) -> None:
    """Add to tokens a share of what has changed of others; changes of keys turn on their way.

    Computes in float32 and rounds once; fp8 saturates.

    Args:
        pages: flat pages `[num_blocks, page_elements]` of a layer, which are written.
        parts: the keys and the values of a page.
        before: of each part, what the changed tokens held, `[rows, heads, channels]` of the pages'
            dtype.
        carried: which tokens take part in which change.
    """
    takes_part = (carried.rows >= 0)[:, None, None]
    rows = carried.rows.clamp_min(0)
    for part, old, shares in zip(parts, before, carried.shares, strict=True):
        change = pick_tokens(pages, part.strides, carried.changed).float() - old.float()
        moved = change[rows]
        if part.rotation is not None:
            turns = carried.cos[carried.distances], carried.sin[carried.distances]
            moved = rotate(moved, part.rotation, *turns)
        held = read_tokens(pages, part.strides, carried.slots)
        changed = held.float() + moved * shares[:, None, None]
        if held.dtype.itemsize == 1:
            largest = torch.finfo(held.dtype).max
            changed = changed.clamp(-largest, largest)
        kept = torch.where(takes_part, indexable(changed.to(held.dtype)), indexable(held))
        write_tokens(pages, part.strides, carried.slots, kept.view(held.dtype))


def rotate(
    tokens: torch.Tensor, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Turn tokens `[tokens, heads, head_size]` by angles given as float32 `[tokens, pairs]`."""
    last = rotation.first + rotation.dim
    turning = tokens[..., rotation.first : last].float()
    if rotation.neox:
        first, second = turning.chunk(2, dim=-1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    if tokens.dtype.itemsize == 1:  # fp8 saturates where a float would go to infinity
        largest = torch.finfo(tokens.dtype).max
        new_first, new_second = (x.clamp(-largest, largest) for x in (new_first, new_second))
    out = tokens.clone()
    if rotation.neox:
        middle = rotation.first + rotation.dim // 2
        out[..., rotation.first : middle] = new_first.to(tokens.dtype)
        out[..., middle:last] = new_second.to(tokens.dtype)
    else:
        out[..., rotation.first : last : 2] = new_first.to(tokens.dtype)
        out[..., rotation.first + 1 : last : 2] = new_second.to(tokens.dtype)
    return out


def sparse_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    values: TiledStrides,
    block_tables: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    value_scale: float = 1.0,
) -> None:
    """Causal attention of queries at arbitrary positions over a paged cache.

    Args:
        out: `[queries, heads, head_size]`, written.
        query: `[queries, heads, head_size]`, rotated, sorted by request, then by position.
        pages: flat pages `[num_blocks, page_elements]` of the layer, of the queries' dtype or fp8;
            positions up to each query's own are filled.
        keys, values: where they lie in a page.
        block_tables: int32 `[requests, blocks]`.
        request: row of `block_tables` of each query, int64 `[queries]`.
        positions: int64 `[queries]`.
        scale, window, sinks, soft_cap: see `attend`; the scale times that of the stored keys.
        value_scale: what stored values are multiplied by.
    """
    for row in request.unique().tolist():
        mine = (request == row).nonzero().flatten()
        where = positions[mine]
        count = int(where.max()) + 1
        used = block_tables[row, : -(-count // keys.shape[1])].long()
        key, value = (part.tokens_of(pages, used)[:count] for part in (keys, values))
        attended = attend(
            query[mine], key, value, where, scale, window=window, sinks=sinks, soft_cap=soft_cap
        )
        out[mine] = (attended * value_scale).to(out.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of one sequence's queries.

    Args:
        query: `[queries, heads, head_size]`.
        key, value: `[tokens, kv_heads, head_size]`, of positions from 0 on.
        positions: int64 `[queries]`.
        scale: softmax scale.
        window: most keys that a query sees, its own and those just before it; 0: all before it.
        chunk: a query sees those from the last multiple of this position on; 0: all before it.
        sinks: a logit of each head that takes part in its softmax and has no value, `[heads]`.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; 0: they stay as they are.

    Returns:
        float32 `[queries, heads, head_size]`.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
    logits = capped(torch.einsum("qhd,thd->hqt", query.float() * scale, key), soft_cap)
    token, own = torch.arange(len(key), device=key.device), positions[:, None]
    hidden = token > own
    if window:
        hidden |= token <= own - window
    if chunk:
        hidden |= token < own // chunk * chunk
    weights = with_sinks(logits.masked_fill(hidden, float("-inf")), sinks).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights[..., : len(key)], value)


def capped(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Logits between `-soft_cap` and `soft_cap`; as they are if that is 0."""
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def with_sinks(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Logits `[heads, queries, tokens]`, and each head's sink behind the last token."""
    if sinks is None:
        return logits
    sink = sinks.to(logits)[:, None, None].expand(*logits.shape[:2], 1)
    return torch.cat([logits, sink], dim=-1)


def token_scores(
    query: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    block_ids: torch.Tensor,
    num_tokens: int,
    scale: float,
    highest: bool = False,
    *,
    last: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention that all queries and heads together pay to each key (SparseX, equations 1 and 2),
    or the most that one of them pays.

    Causal by the queries' own positions; the softmax runs over all keys a query may see.

    Args:
        query: `[queries, heads, head_size]`, rotated.
        positions: int64 `[queries]`, ascending.
        pages: flat pages `[num_blocks, page_elements]` of the layer, of the queries' dtype or fp8.
        keys: where keys lie in a page.
        block_ids: the request's block table, `[blocks]`.
        num_tokens: keys of positions `[0, num_tokens)` are scored.
        scale: softmax scale, times that of the stored keys.
        highest: the highest weight of each key, between 0 and 1, instead of the sum.
        last: beside the sum over all queries, that over so many at the end; None: it is not wanted.
            Not with `highest`.
        sinks, soft_cap: see `attend`.

    Returns:
        float32 `[num_tokens]`; `[2, num_tokens]` with `last`: all queries, and the last.
    """
    kv_heads, block_size, head_size = keys.shape
    groups = query.shape[1] // kv_heads
    used = block_ids[: -(-num_tokens // block_size)].long()
    key = keys.tokens_of(pages, used)[:num_tokens]
    # [kv_heads, head_size, tokens] and [kv_heads, queries, groups, head_size]
    transposed = key.float().permute(1, 2, 0).contiguous()
    grouped = (query.float() * scale).view(-1, kv_heads, groups, head_size).transpose(0, 1)
    late = torch.arange(query.shape[0], device=pages.device) >= query.shape[0] - (last or 0)
    mass = torch.zeros(2, num_tokens, device=pages.device)
    step = max(1, _SCORE_ELEMENTS // (num_tokens * kv_heads * groups))
    for first in range(0, query.shape[0], step):
        block = grouped[:, first : first + step]
        where = positions[first : first + step]
        visible = min(int(where[-1]) + 1, num_tokens)
        logits = torch.matmul(
            block.reshape(kv_heads, -1, head_size), transposed[..., :visible]
        ).view(kv_heads, block.shape[1], groups, visible)
        hidden_from = min(int(where[0]) + 1, visible)
        future = torch.arange(hidden_from, visible, device=pages.device) > where[:, None]
        logits = capped(logits, soft_cap)
        logits[..., hidden_from:].masked_fill_(future[None, :, None], float("-inf"))
        heads = logits.transpose(1, 2).flatten(0, 1)  # [heads, queries, keys]
        weights = with_sinks(heads, sinks).softmax(-1)[..., :visible]
        if highest:
            mass[0, :visible] = torch.maximum(mass[0, :visible], weights.amax((0, 1)))
            continue
        of_query = weights.sum(0)
        mass[0, :visible] += of_query.sum(0)
        mass[1, :visible] += of_query[late[first : first + step]].sum(0)
    return mass[0] if last is None else mass
