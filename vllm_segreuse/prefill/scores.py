# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens: the attention that probes pay them, added up while the layers run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_segreuse.plan import Gather
from vllm_segreuse.prefill.attention import Queries
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import Index


class Scores:
    """Attention that the probes pay, at some layers, to each token of their plan.

    A layer is asked as soon as a chunk has attended there: a probe sees no token behind its own
    chunk. So the queries of one chunk at one layer are held at a time, however many tokens probe.

    Args:
        layers: of the model.
        batch: the plans.
        scored: the layers of the stack that are asked, ascending.
        gather: how what several queries, heads and layers pay becomes one number.
    """

    def __init__(
        self,
        layers: LayerRunner,
        batch: Batch,
        scored: Sequence[int],
        gather: Gather = Gather.SUM,
    ) -> None:
        self._layers, self._batch, self._scored, self._gather = layers, batch, scored, gather
        self._has_last = gather is Gather.SUM_AND_LAST
        rows = 1 + self._has_last
        device = batch.probes.device.device
        self._sums = torch.zeros(rows, len(batch.tokens), device=device)

    def queries(self, computed: Index) -> Queries:
        """What adds up, where these tokens of the batch, the probes among them, run."""
        attention = [self._layers.stack.attention[layer] for layer in self._scored]
        return Queries(attention, self._batch.probes.within(computed), self._ask)

    def _ask(self, number: int, part: slice, queries: torch.Tensor) -> None:
        layer = self._scored[number]
        self.add(self._layers.attention_scores(self._batch, layer, part, queries, self._gather))

    def add(self, paid: torch.Tensor) -> None:
        """Attention that was paid at further layers, in the form of `totals`."""
        add = torch.maximum if self._gather is Gather.MAX else torch.add
        add(self._sums, paid, out=self._sums)

    @property
    def totals(self) -> torch.Tensor:
        """So far: float32 `[tokens]`; `[2, tokens]` under `SUM_AND_LAST`: by all, and by the
        last."""
        return self._sums if self._has_last else self._sums[0]
