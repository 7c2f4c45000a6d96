# SPDX-License-Identifier: Apache-2.0
"""SparseX (arXiv 2606.01751), algorithm 1: dense up to the boundary, score there, sparse from there
on."""

from __future__ import annotations

import numpy as np

from vllm_segreuse.plan import Boundary
from vllm_segreuse.prefill.attention import Queries
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.selection import with_chosen
from vllm_segreuse.prefill.waves import Waves

PROGRAM = Boundary


def run(program: Boundary, layers: LayerRunner, batch: Batch) -> Waves[Computed]:
    """Choose by the attention that the probes pay at the boundary layer."""
    dense_layers = program.dense_layers
    boundary = max(dense_layers, 1)
    probes = batch.probes
    first = batch.everything if dense_layers else batch.always
    assert first.host is not None
    assert probes.host is not None
    probing = np.flatnonzero(np.isin(first.host, probes.host))
    queries = Queries([layers.stack.attention[boundary - 1]], probing)
    state = yield from layers.run(0, boundary, batch.tokens.take(first), None, batch, queries)
    [at_boundary] = queries.by_layer()
    counts = batch.counts(probes)
    scores = layers.attention_paid(batch, boundary - 1, probes.device, counts, at_boundary)
    active = with_chosen(batch, scores).active
    tokens = batch.tokens.take(active)
    if not dense_layers:  # the first layer once more, for some: cheaper than to stop behind it
        return active.device, (yield from layers.all_layers(tokens, batch))
    state = state.take(active.device)
    state = yield from layers.run(boundary, len(layers), tokens, state, batch)
    return active.device, state


def proof_cases(_: int) -> list[ProofCase]:
    """With and without dense layers."""
    return [ProofCase(Boundary(), top_k=9), ProofCase(Boundary(dense_layers=1), top_k=9)]
