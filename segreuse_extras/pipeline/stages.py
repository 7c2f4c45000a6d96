# SPDX-License-Identifier: Apache-2.0
"""What binds a worker to the other pipeline stages, from the start-up proof on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from segreuse_extras.pipeline.backlog import StageBacklog
from segreuse_extras.pipeline.link import Link
from segreuse_extras.pipeline.proof import HandedStates, Rehearsal, exchange
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.prefill.backlog import Backlog
from vllm_segreuse.prefill.checks import PassParts, prove_parts
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.proofs.passes import allowed_deviation, require_equal
from vllm_segreuse.prefill.proofs.scratch import Scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LinkedStages:
    """See `prefill.checks.OtherStages`.

    Args:
        link: to the other stages.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def exchange(self, scratch: Scratch) -> LayerState | None:
        stack = scratch.stack
        device = stack.attention[0].kv_cache.device
        self._link.sample = stack.sample_of_handed(scratch.dtype, device)
        return exchange(scratch, self._link)

    def proven(self, parts: PassParts) -> tuple[SparsePrefill, float]:
        layers = parts.layers()
        prefill = SparsePrefill(layers, parts.aligner)
        rehearsed = SparsePrefill(layers, parts.aligner, run_program=Rehearsal(parts.scratch))
        if parts.handed is None:
            return prefill, prove_parts(parts, rehearsed)
        compared = layers.onward = HandedStates(parts.handed)
        deviation = prove_parts(parts, rehearsed)
        require_equal(
            "what a pass hands to the next pipeline stage",
            compared.worst,
            allowed_deviation(parts.scratch),
        )
        layers.onward = self._link
        return prefill, max(deviation, compared.worst)

    def backlog(self, prefill: SparsePrefill, step_work: int) -> Backlog:
        return StageBacklog(prefill, step_work, prefill.runner.stage, self._link)


def linked(vllm_config: VllmConfig) -> LinkedStages | None:
    """To the other stages of an engine; None: there are none. All ranks take part."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return None
    return LinkedStages(Link(torch.device(vllm_config.device_config.device)))
