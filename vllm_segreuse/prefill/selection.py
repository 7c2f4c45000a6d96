# SPDX-License-Identifier: Apache-2.0
"""Choose the reused tokens to recompute by the attention that probe queries pay them."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group

_SCORE_ELEMENTS = 1 << 24  # bound on one block of attention weights (64 MiB in float32)


def attention_mass(
    queries: torch.Tensor,
    query_positions: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention that all queries and heads together pay to each key (SparseX, equations 1 and 2).

    Causal by the queries' own positions; the softmax runs over all keys a query may see.

    Args:
        queries: `[queries, heads, head_size]`, rotated.
        query_positions: int64 `[queries]`, ascending.
        keys: `[tokens, kv_heads, head_size]`, rotated, of positions 0, 1, ...
        scale: softmax scale.

    Returns:
        float32 `[tokens]`.
    """
    num_tokens, kv_heads, head_size = keys.shape
    groups = queries.shape[1] // kv_heads
    # [kv_heads, head_size, tokens] and [kv_heads, queries, groups, head_size]
    transposed = keys.float().permute(1, 2, 0).contiguous()
    grouped = (queries.float() * scale).view(-1, kv_heads, groups, head_size).transpose(0, 1)
    mass = torch.zeros(num_tokens, device=keys.device)
    step = max(1, _SCORE_ELEMENTS // (num_tokens * kv_heads * groups))
    for first in range(0, queries.shape[0], step):
        block = grouped[:, first : first + step]
        positions = query_positions[first : first + step]
        visible = int(positions[-1]) + 1
        logits = torch.matmul(
            block.reshape(kv_heads, -1, head_size), transposed[..., :visible]
        ).view(kv_heads, block.shape[1], groups, visible)
        hidden_from = int(positions[0]) + 1
        future = torch.arange(hidden_from, visible, device=keys.device) > positions[:, None]
        logits[..., hidden_from:].masked_fill_(future[None, :, None], float("-inf"))
        mass[:visible] += logits.softmax(-1).sum((0, 1, 2))
    return mass


def choose_top_k(scores: list[torch.Tensor], top_k: list[int]) -> list[torch.Tensor]:
    """Indices of the `top_k[i]` largest entries of `scores[i]`, ascending; the same on every TP
    rank.

    Scores of one rank cover its own heads: they are summed over ranks, and rank 0's choice is
    everyone's, since ranks that disagree about the tokens of a pass would hang in its collectives.
    Candidates are told from the rest by a finite score.
    """
    group = get_tp_group()
    flat = torch.cat(scores)
    if group.world_size > 1:
        excluded = flat.isinf()
        flat = group.all_reduce(flat.masked_fill(excluded, 0.0)).masked_fill(
            excluded, float("-inf")
        )
    chosen, first = [], 0
    for part, k in zip(scores, top_k, strict=True):
        own = flat[first : first + part.numel()]
        # A stable sort breaks ties by position: the same choice in every run.
        chosen.append(torch.sort(own, descending=True, stable=True).indices[:k])
        first += part.numel()
    together = torch.cat(chosen)
    if group.world_size > 1:
        together = group.broadcast(together, src=0)
    return [part.sort().values for part in together.split(top_k)]
