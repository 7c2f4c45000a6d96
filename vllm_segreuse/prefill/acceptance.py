# SPDX-License-Identifier: Apache-2.0
"""How far the halos of similar segments are from what their donors hold.

The first tokens of a similar segment are always computed. Their donor's keys and values are moved
all the same, and kept until the pass has computed them anew: the *boundary drift* of a segment is
the mean relative difference of both, of keys and of values at all layers at which anything is
moved. It is the measure of `drift.py`, before that is divided by how much is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vllm_segreuse.kernels.page_tokens import pick_tokens
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.plan import Check
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.compared import COMPARED_TOKENS
from vllm_segreuse.prefill.drift import summed_differences
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import upload


class Halos:
    """Keys and values of halo tokens as they were moved; made before these are computed.

    Args:
        layers: of the model.
        batch: the plans.
    """

    def __init__(self, layers: LayerRunner, batch: Batch) -> None:
        self._layers = layers
        self._moved_at = range(batch.program.dense_layers, len(layers))
        parts, self._counts = [], []
        for plan, first in zip(batch.plans, batch.bounds, strict=False):
            if plan.check is not None:
                compared = compared_tokens(plan.check)
                parts += [each + int(first) for each in compared]
                self._counts += [each.size for each in compared]
        flat = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        self._slots = batch.tokens.slots[upload(flat.astype(np.int64), batch.tokens.slots.device)]
        self._moved = list(self._held())

    def drifts(self) -> torch.Tensor:
        """Boundary drift of each segment, float64 `[segments]`, by plan, equal on all ranks. To be
        called once halos are computed."""
        device = self._slots.device
        totals = summed_differences(self._moved, self._held(), self._counts, device)
        return totals / upload(np.array(self._counts, float), device)

    def _held(self) -> Iterator[torch.Tensor]:
        """Keys, then values, of each layer: `[tokens, heads, channels]`, in the type of pages."""
        for layer in self._moved_at:
            pages, layout = typed_pages(self._layers.stack.attention[layer]), self._layers.layouts
            for strides in (layout[layer].keys, layout[layer].values):
                yield pick_tokens(pages, strides, self._slots)


def compared_tokens(check: Check) -> list[np.ndarray]:
    """Tokens of each halo that are compared, counted from the plan's start: all, or evenly spaced
    ones, the last among them. Of a plan they are `COMPARED_TOKENS` at most, and one of each segment
    more."""
    halos = (check.halo_stop - check.first).sum()
    step = max(1, -(-int(halos) // COMPARED_TOKENS))
    return [
        np.arange(stop - 1, first - 1, -step)
        for first, stop in zip(check.first, check.halo_stop, strict=True)
    ]
