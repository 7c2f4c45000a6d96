# SPDX-License-Identifier: Apache-2.0
"""Choose the reused tokens to recompute by their scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from vllm.distributed import get_tp_group

from vllm_segreuse.plan import Gather
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.tokens import Index, upload

_NOT_CHOSEN = -1
BEGINNING = 4
"""First tokens of a segment, which are not in its mean."""
_LEAST_MEAN = 1e-12


class Choice(NamedTuple):
    """Tokens of a batch that were chosen.

    Attributes:
        chosen: int64, ascending flat indices.
        counts: how many of each plan were chosen; the most of it, where there is a threshold.
    """

    chosen: torch.Tensor
    counts: list[int]

    def beside(self, others: Index) -> Index:
        """They and others."""
        return Index.computed(torch.cat([others.device, self.chosen]).sort().values)


class TokenSegments(NamedTuple):
    """Where each token's segment is, among all tokens.

    Attributes:
        first, stop: int64 `[tokens]`; the same for tokens in none.
        counts: bool `[tokens]`: in the mean of its segment.
    """

    first: torch.Tensor
    stop: torch.Tensor
    counts: torch.Tensor


def choose_tokens(
    batch: Batch,
    scores: torch.Tensor,
    gather: Gather = Gather.SUM,
    threshold: float = 0.0,
    levelling: float = 0.0,
) -> Choice:
    """Each plan's `top_k` tokens with the largest scores, of those that may be chosen.

    Plans whose scores are not numbers are not `sound` from here on.

    Args:
        batch: the plans.
        scores: float32 `[tokens]`, or `[2, tokens]` (`choose`).
        gather, threshold: see `choose`.
        levelling: see `Probed`.
    """
    not_chosen = upload(~batch.may_be_chosen, scores.device)
    candidates = scores.masked_fill(not_chosen, float("-inf")).split(batch.lengths, dim=-1)
    top_k = [plan.recipe.top_k for plan in batch.plans]
    segments = _segments(batch, scores.device) if levelling else None
    chosen, numbers = choose(list(candidates), top_k, gather, threshold, segments, levelling)
    batch.sound &= numbers
    counts = [min(k, length) for k, length in zip(top_k, batch.lengths, strict=True)]
    return Choice(chosen, counts)


def _segments(batch: Batch, device: torch.device) -> TokenSegments:
    runs = batch.runs_of_candidates
    where = np.flatnonzero(runs >= 0)
    _, begins, lengths = np.unique(runs[where], return_index=True, return_counts=True)
    first, stop = np.zeros_like(runs), np.zeros_like(runs)
    first[where] = np.repeat(where[begins], lengths)
    stop[where] = first[where] + np.repeat(lengths, lengths)
    # Everything attends to what begins a text; a segment of fewer tokens has nothing else.
    inside = np.arange(len(runs)) - first
    counts = (runs >= 0) & ((inside >= BEGINNING) | (stop - first <= BEGINNING))
    return TokenSegments(upload(first, device), upload(stop, device), upload(counts, device))


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean over tensor-parallel ranks, to the last bit the same on each of them."""
    group = get_tp_group()
    if group.world_size == 1:
        return values
    mean: torch.Tensor = group.broadcast(group.all_reduce(values) / group.world_size, src=0)
    return mean


def choose(
    scores: list[torch.Tensor],
    top_k: list[int],
    gather: Gather = Gather.SUM,
    threshold: float = 0.0,
    segments: TokenSegments | None = None,
    levelling: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k[i]` largest entries of `scores[i]`; the same ones on every TP rank.

    Scores of one rank cover its own heads, so they are gathered over ranks first. Rank 0's choice
    is everyone's, since ranks that disagree about the tokens of a pass would hang in its
    collectives. Tokens that are no candidates have a score of minus infinity.

    Args:
        scores: float32 `[tokens]` each; `[2, tokens]` under `SUM_AND_LAST`, of which the geometric
            mean over all ranks counts.
        top_k: how many of each.
        gather: how scores of several ranks become one.
        threshold: if above 0, `top_k` is the most, and entries below this are not chosen. How many
            are is then read back from the device.
        segments, levelling: scores are divided by the mean score of their segment to this power;
            None: they are not.

    Returns:
        The chosen ones, as ascending indices into all scores put together; and, bool `[scores]`,
        whether those of a tensor are numbers. Where one is NaN, so was what was attended to, and
        the choice means nothing.
    """
    group = get_tp_group()
    flat = torch.cat(scores, dim=-1)
    if group.world_size > 1:
        if gather is Gather.MAX:  # a rank has seen the peaks of its own heads only
            flat = group.all_gather(flat[None], dim=0).amax(0)
        else:
            excluded = flat.isinf()
            summed = group.all_reduce(flat.masked_fill(excluded, 0.0))
            flat = summed.masked_fill(excluded, float("-inf"))
    if gather is Gather.SUM_AND_LAST:
        excluded = flat[0].isinf()
        flat = flat.prod(0).sqrt().masked_fill(excluded, float("-inf"))
    chosen, first = [], 0
    parts = flat.split([part.shape[-1] for part in scores])
    numbers = torch.stack([~part.isnan().any() for part in parts])
    if segments is not None:
        flat = flat * _means(flat, segments).pow(-levelling)
        parts = flat.split([len(part) for part in parts])
    for part, k in zip(parts, top_k, strict=True):
        # A stable sort breaks ties by position: the same choice in every run.
        ranked = torch.sort(part, descending=True, stable=True)
        indices = ranked.indices[:k] + first
        if threshold:
            indices = indices.masked_fill(ranked.values[:k] < threshold, _NOT_CHOSEN)
        chosen.append(indices)
        first += part.numel()
    together = torch.cat(chosen)
    if group.world_size > 1:  # near ties: ranks may round differently
        together = group.broadcast(together, src=0)
    if threshold:
        together = together[together != _NOT_CHOSEN]
    return together.sort().values, numbers


def _means(scores: torch.Tensor, segments: TokenSegments) -> torch.Tensor:
    """Of each token, the mean score of its segment, float32 `[tokens]`, above 0."""
    counted = scores.where(segments.counts & scores.isfinite(), 0.0).double()
    # By differences of one running sum: the same in every run, as sums by index are not on a GPU.
    both = torch.stack([counted, segments.counts.double()]).cumsum(1)
    sums, numbers = torch.nn.functional.pad(both, (1, 0)).unbind(0)
    sums = sums[segments.stop] - sums[segments.first]
    numbers = numbers[segments.stop] - numbers[segments.first]
    return (sums / numbers.clamp_min(1)).float().clamp_min(_LEAST_MEAN)
