# SPDX-License-Identifier: Apache-2.0
"""Tokens of similar segments enter between layers, from the boundary states of their donors."""

from __future__ import annotations

from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.plan import Staged
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import LONG_STRETCH, Computed, ProofCase
from vllm_segreuse.prefill.tokens import Index

PROGRAM = Staged


def run(program: Staged, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """The layers up to each cut on what has come there, and on more tokens behind it."""
    active, state, first = batch.always, None, 0
    for cut in program.cuts:
        state = yield from _run(first, cut, active, state, layers, batch)
        active, state = layers.enter(cut, active, state, batch)
        first = cut
    state = yield from _run(first, len(layers), active, state, layers, batch)
    return active.device, state


def _run(
    first: int,
    last: int,
    active: Index,
    state: LayerState | None,
    layers: LayerRunner,
    batch: Batch,
) -> Chunks[LayerState | None]:
    if not len(active):
        return None
    return (yield from layers.run(first, last, batch.tokens.take(active), state, batch))


def proof_cases(num_layers: int) -> list[ProofCase]:
    """Stops between layers, scattered and in rows; what enters there is proven apart
    (`proofs/states.py`)."""
    program = Staged((num_layers // 2,))
    return [ProofCase(program), ProofCase(program, stretch=LONG_STRETCH)]
