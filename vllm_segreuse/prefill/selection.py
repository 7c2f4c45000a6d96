# SPDX-License-Identifier: Apache-2.0
"""Choose the reused tokens to recompute by the attention that probe queries pay them."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group

PEAK_RANK = 8
"""The peak of scores is the eighth highest: a few tokens that draw attention whatever the question
is (attention sinks) do not set the measure for the rest."""

_NOT_CHOSEN = -1


def choose(scores: list[torch.Tensor], top_k: list[int], least_share: float) -> torch.Tensor:
    """The `top_k[i]` largest entries of `scores[i]`, as ascending indices into all of them put
    together; the same on every TP rank.

    Scores of one rank cover its own heads: they are summed over ranks, and rank 0's choice is
    everyone's, since ranks that disagree about the tokens of a pass would hang in its collectives.
    Candidates are told from the rest by a finite score.

    Args:
        scores: float32 `[tokens]` each.
        top_k: how many of each.
        least_share: if above 0, `top_k` is the most, and entries below this share of the peak are
            left out. How many are chosen is then read back from the device.
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
        # A stable sort breaks ties by position: the same choice in every run.
        ranked = torch.sort(flat[first : first + part.numel()], descending=True, stable=True)
        indices = ranked.indices[:k] + first
        if least_share and k:
            values = ranked.values[:k]
            peak = values[min(PEAK_RANK, k) - 1]
            indices = indices.masked_fill(values < least_share * peak, _NOT_CHOSEN)
        chosen.append(indices)
        first += part.numel()
    together = torch.cat(chosen)
    if group.world_size > 1:
        together = group.broadcast(together, src=0)
    if least_share:
        together = together[together != _NOT_CHOSEN]
    return together.sort().values
