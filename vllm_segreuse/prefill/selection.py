# SPDX-License-Identifier: Apache-2.0
"""Choose the reused tokens to recompute by the attention that probe queries pay them."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group

_NOT_CHOSEN = -1


def choose(
    scores: list[torch.Tensor], top_k: list[int], least_share: float = 0.0, highest: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k[i]` largest entries of `scores[i]`; the same ones on every TP rank.

    Scores of one rank cover its own heads: their sum over ranks decides, or the highest, and rank
    0's choice is everyone's, since ranks that disagree about the tokens of a pass would hang in its
    collectives. Candidates are told from the rest by a finite score.

    Args:
        scores: float32 `[tokens]` each.
        top_k: how many of each.
        least_share: if above 0, `top_k` is the most, and entries below this are left out. How many
            are chosen is then read back from the device.
        highest: scores are peaks, not sums.

    Returns:
        The chosen ones, as ascending indices into all scores put together; and, bool `[scores]`,
        whether those of a tensor are numbers. Where one is NaN, so was what was attended to, and
        the choice means nothing.
    """
    group = get_tp_group()
    flat = torch.cat(scores)
    if group.world_size > 1:
        if highest:
            flat = group.all_gather(flat[None], dim=0).amax(0)
        else:
            excluded = flat.isinf()
            summed = group.all_reduce(flat.masked_fill(excluded, 0.0))
            flat = summed.masked_fill(excluded, float("-inf"))
    chosen, first = [], 0
    parts = flat.split([part.numel() for part in scores])
    numbers = torch.stack([~part.isnan().any() for part in parts])
    for part, k in zip(parts, top_k, strict=True):
        # A stable sort breaks ties by position: the same choice in every run.
        ranked = torch.sort(part, descending=True, stable=True)
        indices = ranked.indices[:k] + first
        if least_share:
            indices = indices.masked_fill(ranked.values[:k] < least_share, _NOT_CHOSEN)
        chosen.append(indices)
        first += part.numel()
    together = torch.cat(chosen)
    if group.world_size > 1:
        together = group.broadcast(together, src=0)
    if least_share:
        together = together[together != _NOT_CHOSEN]
    return together.sort().values, numbers
