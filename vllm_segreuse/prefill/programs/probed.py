# SPDX-License-Identifier: Apache-2.0
"""The new tokens through the layers, and then the probes among them once more, together with what
is chosen by their attention (after ProphetKV, arXiv 2602.02579, where all new tokens probe)."""

from __future__ import annotations

import torch

from vllm_segreuse.model.layers import LayerState
from vllm_segreuse.plan import Gather, Probed
from vllm_segreuse.plan.programs import LAST_PROBES
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.drift import MovedValues
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.selection import choose_tokens
from vllm_segreuse.prefill.tokens import Index
from vllm_segreuse.prefill.waves import Waves

PROGRAM = Probed


def run(program: Probed, layers: LayerRunner, batch: Batch) -> Waves[Computed]:
    """Choose by the attention that the probes pay."""
    scores, once, before = yield from _attention(program, layers, batch)
    choice = choose_tokens(batch, scores, program.gather, program.threshold)
    moved = MovedValues(layers, batch, choice) if program.measures_drift else None
    again = choice.beside(batch.probes)
    state = yield from layers.all_layers(batch.tokens.take(again), batch)
    if moved is not None:
        batch.drift = moved.drift()
    return torch.cat([once.device, again.device]), before.followed_by(state)


def _attention(
    program: Probed, layers: LayerRunner, batch: Batch
) -> Waves[tuple[torch.Tensor, Index, LayerState]]:
    """Attention that the probes pay to each token of their plan.

    Returns:
        float32 `[tokens]`; `[2, tokens]` under `SUM_AND_LAST`: by all, and by the last. And what is
        always computed and does not probe, with its state: all layers have been run on it.
    """
    gather, probes, counts = program.gather, batch.probes, batch.counts(batch.probes)
    add = torch.maximum if gather is Gather.MAX else torch.add
    scores = torch.zeros(1 + (gather is Gather.SUM_AND_LAST), len(batch.tokens))
    scores = scores.to(probes.device.device)
    scored = program.scored_layers(layers.model)
    queries, once, before = yield from layers.queries(probes, batch.always, scored, batch)
    for layer, of_layer in zip(scored, queries, strict=True):
        asked = batch, layer, probes.device, counts, of_layer
        add(scores[0], layers.attention_paid(*asked, gather=gather), out=scores[0])
        if gather is Gather.SUM_AND_LAST:
            scores[1] += layers.attention_paid(*asked, last=LAST_PROBES)
        yield len(probes)  # about what these tokens' attention at one layer takes
    return (scores if gather is Gather.SUM_AND_LAST else scores[0]), once, before


def proof_cases(num_layers: int) -> list[ProofCase]:
    """By sums, by peaks above a threshold, and by sums over some layers."""
    return [
        ProofCase(Probed(Gather.SUM), top_k=9),
        ProofCase(Probed(Gather.MAX, threshold=0.01), top_k=9),
        ProofCase(Probed(Gather.SUM_AND_LAST, first_layer=num_layers // 2), top_k=9),
    ]
