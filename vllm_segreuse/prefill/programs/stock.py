# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself would do with these tokens: to the last bit the same, wherever its results do
not depend on the batch."""

from __future__ import annotations

from vllm_segreuse.plan import Stock
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import LONG_STRETCH, Computed, ProofCase

PROGRAM = Stock


def run(_: Stock, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """The model's own forward on the tokens that are always computed."""
    active = batch.always
    if not len(active):
        return active.device, None
    return active.device, (yield from layers.stock_model(batch.tokens.take(active), batch))


def proof_cases(_: int) -> list[ProofCase]:
    """In rows: this program has no others."""
    return [ProofCase(Stock(), stretch=LONG_STRETCH)]
