# SPDX-License-Identifier: Apache-2.0
"""The probes alone through the layers, and then all that is chosen together with the new tokens
(after ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

import torch

from vllm_segreuse.plan import Gather, Probed
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.selection import with_chosen
from vllm_segreuse.prefill.waves import Waves

PROGRAM = Probed

_GATHERED = {Gather.SUM: torch.add, Gather.MAX: torch.maximum}


def run(program: Probed, layers: LayerRunner, batch: Batch) -> Waves[Computed]:
    """Choose by the attention that the probes pay at all layers but the last."""
    scores = yield from _attention_at_all_layers(program.gather, layers, batch)
    active = with_chosen(batch, scores, program.gather, program.threshold)
    return active.device, (yield from layers.all_layers(batch.tokens.take(active), batch))


def _attention_at_all_layers(
    gather: Gather, layers: LayerRunner, batch: Batch
) -> Waves[torch.Tensor]:
    """Attention that the probes pay to each token of their plan, float32 `[tokens]`."""
    probes, counts = batch.probes, batch.counts(batch.probes)
    total = torch.zeros(len(batch.tokens), device=probes.device.device)
    queries = yield from layers.queries(batch.tokens.take(probes), batch)
    for layer, of_layer in enumerate(queries):
        paid = layers.attention_paid(batch, layer, probes.device, counts, of_layer, gather)
        total = _GATHERED[gather](total, paid)
        yield len(probes)  # about what these tokens' attention at one layer takes
    return total


def proof_cases(_: int) -> list[ProofCase]:
    """By sums, and by peaks above a threshold."""
    return [
        ProofCase(Probed(Gather.SUM), top_k=9),
        ProofCase(Probed(Gather.MAX, threshold=0.01), top_k=9),
    ]
