# SPDX-License-Identifier: Apache-2.0
"""Passes by CUDA graphs reproduce the KV of the model's own forward."""

from __future__ import annotations

import numpy as np
import torch

from vllm_segreuse.compat.model_runner import CapturedGraphs
from vllm_segreuse.plan import Fixed
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.graphs import CudaGraphs
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.proofs.passes import (
    allowed_deviation,
    deviation,
    plan_of,
    require_equal,
)
from vllm_segreuse.prefill.proofs.scratch import Scratch


class GraphProof:
    """Lets passes run by CUDA graphs, which vLLM captures behind all other proofs.

    Args:
        scratch: tokens in blocks of the empty cache.
        prefill: the sparse pass.
        layers: what it runs.

    Attributes:
        scratch, layers: as given.
    """

    def __init__(self, scratch: Scratch, prefill: SparsePrefill, layers: LayerRunner) -> None:
        self.scratch = scratch
        self._prefill = prefill
        self.layers = layers

    @torch.inference_mode()
    def prove(self, captured: CapturedGraphs) -> None:
        """Run a pass by each graph; those to come use them.

        Each computes as many of the scratch tokens as the graph has room for, and pads the rest.

        Raises:
            UnsupportedModelError: the keys and values of one differ from those of the model's own
                forward by more than rounding.
        """
        scratch, graphs = self.scratch, CudaGraphs(self.layers.stack, captured)
        scratch.clear_own()  # vLLM has warmed up since, and may have left NaN
        scratch.forward()
        allowed = allowed_deviation(scratch)
        self.layers.graphs = graphs
        for size in graphs.sizes:
            scratch.clear_copy()
            active = min(size, scratch.count)
            computed = np.zeros(scratch.count, dtype=np.bool_)
            computed[np.linspace(0, scratch.count - 1, active).round().astype(int)] = True
            with graphs.of_at_least(size):
                self._prefill.run([plan_of(scratch, ~computed, Fixed(), top_k=0)])
            what = f"a pass by vLLM's CUDA graph of {size} tokens"
            require_equal(what, deviation(scratch), allowed)
