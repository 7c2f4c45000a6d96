# SPDX-License-Identifier: Apache-2.0
"""SparseX (arXiv 2606.01751), algorithm 1: dense up to the boundary, score there, sparse from there
on."""

from __future__ import annotations

from vllm_segreuse.plan import Boundary
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.scores import Scores
from vllm_segreuse.prefill.selection import choose_tokens

PROGRAM = Boundary


def run(program: Boundary, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """Choose by the attention that the probes pay at the scored layer.

    Behind the dense layers, only what is always computed goes on to that layer before the choice;
    and behind the choice, the suffix does not.
    """
    dense_layers, scored = program.dense_layers, program.scored_layer(layers.model)
    reach_it = batch.everything if scored < dense_layers else batch.always
    scores = Scores(layers, batch, [scored])
    queries = scores.queries(reach_it)
    state = None
    if dense_layers:
        state = yield from layers.run(0, dense_layers, batch.tokens, None, batch, queries)
        layers.note_finite(state, batch.tokens, batch)
    if scored >= dense_layers:
        before = None if state is None else state.take(batch.always.device)
        always = batch.tokens.take(batch.always)
        asked = yield from layers.run(dense_layers, scored + 1, always, before, batch, queries)
        layers.note_finite(asked, always, batch)
        del asked
    active = choose_tokens(batch, scores.totals).beside(batch.always.without(batch.suffix))
    tokens = batch.tokens.take(active)
    if state is None:  # some layers once more, for some tokens: cheaper than to stop behind them
        return active.device, (yield from layers.all_layers(tokens, batch))
    state = layers.keep(state, active.device)
    state = yield from layers.run(dense_layers, len(layers), tokens, state, batch)
    return active.device, state


def proof_cases(_: int) -> list[ProofCase]:
    """With and without dense layers."""
    return [ProofCase(Boundary(), top_k=9), ProofCase(Boundary(dense_layers=1), top_k=9)]
