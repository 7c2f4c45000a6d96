# SPDX-License-Identifier: Apache-2.0
"""No choice to make: the active tokens of every layer are known."""

from __future__ import annotations

from vllm_segreuse.plan import Fixed
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import LONG_STRETCH, Computed, ProofCase

PROGRAM = Fixed


def run(program: Fixed, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """All tokens through the dense layers, those that are always computed through the others."""
    active = batch.always
    tokens = batch.tokens.take(active)
    if not program.dense_layers:
        if not len(active):
            return active.device, None
        return active.device, (yield from layers.all_layers(tokens, batch))
    state = yield from layers.run(0, program.dense_layers, batch.tokens, None, batch)
    state = layers.keep(state, active.device)
    if len(active):
        state = yield from layers.run(program.dense_layers, len(layers), tokens, state, batch)
    return active.device, state


def proof_cases(num_layers: int) -> list[ProofCase]:
    """Scattered and in rows, and behind dense layers only."""
    return [
        ProofCase(Fixed()),
        ProofCase(Fixed(), stretch=LONG_STRETCH),
        ProofCase(Fixed(num_layers)),
    ]
