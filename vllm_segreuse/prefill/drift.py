# SPDX-License-Identifier: Apache-2.0
"""How far reused KV is from what its new context would make of it.

What is recomputed was moved before. Both are compared: the values of some of the chosen tokens, at
a few layers of the second half. Their mean relative difference says how wrong moved tokens are;
and the fewer tokens of a segment are recomputed, the more of them stay so. So the *drift* is that
difference, divided by the recomputed tokens of a segment, per hundred of them. Segments of which no
token may be chosen do not count: they were not moved out of their context. It costs a few small
reads per request. docs/quality.md has how closely it follows the divergence from full prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from vllm_segreuse.kernels.page_tokens import pick_tokens
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.compared import COMPARED_TOKENS
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.selection import Choice, mean_over_ranks
from vllm_segreuse.prefill.tokens import upload

LAYERS = 4
PER_TOKENS = 100
_SMALLEST_NORM = 1e-6


def relative_difference(moved: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How far keys or values of tokens are off that were moved: by head, relative to the norm of
    the new ones, and the mean over heads.

    Args:
        moved, new: `[tokens, heads, channels]`.

    Returns:
        float32 `[tokens]`.
    """
    moved, new = moved.float(), new.float()
    relative = (new - moved).norm(dim=-1) / new.norm(dim=-1).clamp_min(_SMALLEST_NORM)
    return relative.mean(-1)


def summed_differences(
    moved: Sequence[torch.Tensor],
    new: Iterable[torch.Tensor],
    counts: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    """How far groups of tokens are off: of each the sum over its tokens of the mean relative
    difference, float64 `[groups]`, equal on all ranks.

    Args:
        moved, new: `[tokens, heads, channels]` of each layer.
        counts: tokens of each group, which follow one another.
        device: of the model.
    """
    of_group = upload(np.repeat(np.arange(len(counts)), counts), device)
    apart = torch.zeros(of_group.numel(), device=device)
    for before, after in zip(moved, new, strict=True):
        apart += relative_difference(before, after) / len(moved)
    totals = torch.zeros(len(counts), device=device)
    totals.scatter_add_(0, of_group, apart)
    # Each rank has its own heads. CPU ranks cannot add float64.
    return mean_over_ranks(totals).double()


class MovedValues:
    """Values of chosen tokens as they were moved; made before these are recomputed.

    Args:
        layers: of the model.
        batch: the plans.
        choice: what is about to be recomputed of them.
    """

    def __init__(self, layers: LayerRunner, batch: Batch, choice: Choice) -> None:
        self._layers, self._batch, self._chosen = layers, batch, choice.counts
        parts = choice.chosen.split(choice.counts)
        steps = [max(1, -(-count // COMPARED_TOKENS)) for count in choice.counts]
        sample = [part[::step] for part, step in zip(parts, steps, strict=True)]
        self._counts = [part.numel() for part in sample]
        self._sample = torch.cat(sample)
        everywhere = spread_over(len(layers))
        self._compared = layers.own(everywhere)
        self._share = len(self._compared) / len(everywhere)
        self._moved = self._values()

    def drift(self) -> torch.Tensor:
        """Drift of each plan, float64 `[plans]`, equal on all ranks; 0 where nothing was chosen.
        To be called once they are recomputed. Of a pipeline stage its part: the sum over all of
        them is the drift."""
        totals = summed_differences(self._moved, self._values(), self._counts, self._sample.device)
        factors = [
            plan.num_segments_to_choose_of
            * PER_TOKENS
            / max(1, count)
            / max(1, chosen)
            * self._share
            for plan, count, chosen in zip(
                self._batch.plans, self._counts, self._chosen, strict=True
            )
        ]
        return totals * upload(np.array(factors), totals.device)

    def _values(self) -> list[torch.Tensor]:
        known = [self._layers.known[layer] for layer in self._compared]
        slots = {it.table: self._batch.slots(self._sample, it.table) for it in known}
        return [pick_tokens(it.pages, it.layout.values, slots[it.table]) for it in known]


def spread_over(num_layers: int) -> list[int]:
    """`LAYERS` of the second half of the layers, evenly spaced; all of a smaller half."""
    first = num_layers // 2
    count = min(LAYERS, num_layers - first)
    return [first + i * (num_layers - first) // count for i in range(count)]
