# SPDX-License-Identifier: Apache-2.0
"""Choose the reused tokens to recompute by the attention that probe queries pay them."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group


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
