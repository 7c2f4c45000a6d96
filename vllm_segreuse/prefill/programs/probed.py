# SPDX-License-Identifier: Apache-2.0
"""The new tokens through the layers, and then the probes among them once more, together with what
is chosen by their attention (after ProphetKV, arXiv 2602.02579, where all new tokens probe).

As a rule all probes stand at the end of the prompt. Then what is chosen runs alone, and vLLM's
forward is the second reading.
"""

from __future__ import annotations

import torch

from vllm_segreuse.plan import Gather, Probed
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.carried import CarriedChanges, carries
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.drift import MovedValues
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.scores import Scores
from vllm_segreuse.prefill.selection import choose_tokens

PROGRAM = Probed


def run(program: Probed, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """Choose by the attention that the probes pay.

    Returns: of the suffix nothing.
    """
    scored, probes = program.scored_layers(layers.model), batch.probes
    scores = Scores(layers, batch, scored, program.gather)
    queries = scores.queries(batch.always)
    computing = layers.up_to_choice(probes, batch.always, scored[-1], queries, batch)
    once, before = yield from computing
    choice = choose_tokens(
        batch, scores.totals, program.gather, program.threshold, program.levelling
    )
    moved = MovedValues(layers, batch, choice) if program.measures_drift else None
    again = choice.beside(probes.without(batch.suffix))
    if not len(again):  # no token's score was above the threshold
        return once.device, before
    before = before.summed().clone()  # without the room that the probes' states took
    carried = None
    if program.carries and carries(layers, batch):
        carried = CarriedChanges(layers, batch, again)
    state = yield from layers.all_layers(batch.tokens.take(again), batch, carried)
    if moved is not None:
        batch.drift = moved.drift()
    state = state.summed()
    return torch.cat([once.device, again.device]), before.followed_by(state)


def proof_cases(num_layers: int) -> list[ProofCase]:
    """By sums, by peaks above a threshold, and by sums over some layers."""
    return [
        ProofCase(Probed(Gather.SUM), top_k=9),
        ProofCase(Probed(Gather.MAX, threshold=0.01), top_k=9),
        ProofCase(
            Probed(Gather.SUM_AND_LAST, first_layer=num_layers // 2, levelling=0.75, carries=True),
            top_k=9,
        ),
    ]
