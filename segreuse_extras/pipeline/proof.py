# SPDX-License-Identifier: Apache-2.0
"""Proofs of a stage by itself: it is given what the stage before has made of the scratch tokens."""

from __future__ import annotations

import math

import torch

from segreuse_extras.pipeline.goes import Go, first_go
from segreuse_extras.pipeline.link import Link
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.prefill import programs
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed
from vllm_segreuse.prefill.proofs.scratch import Scratch, relative_error
from vllm_segreuse.prefill.tokens import Index


class HandedStates:
    """Compares what passes hand on with what the model's own forward does.

    Args:
        expected: of each scratch token.

    Attributes:
        worst: how far any chunk was off, relative to its norm.
    """

    def __init__(self, expected: LayerState) -> None:
        self._expected = expected
        self.worst = 0.0

    def send_states(self, index: Index, state: LayerState) -> None:
        """What a pass hands on; tokens of its plan are the scratch tokens."""
        expected = self._expected.take(index.device)
        if expected.tensors.keys() != state.tensors.keys():
            raise UnsupportedModelError(
                f"a pass hands on {', '.join(state.tensors)} to the next pipeline stage, the model "
                f"{', '.join(expected.tensors)}"
            )
        error = relative_error(state.stream, expected.stream)
        self.worst = max(self.worst, math.inf if math.isnan(error) else error)


@torch.inference_mode()
def exchange(scratch: Scratch, link: Link) -> LayerState | None:
    """Scratch tokens, from stage to stage, through the model's own forward: from here on each stage
    has what it is given of them.

    Returns:
        What this one hands on; None: it is the last.
    """
    stage = scratch.stage
    if not stage.is_first:
        scratch.entering = link.receive().state
    if stage.is_last:
        return None
    handed = scratch.hand_on()
    tokens = torch.arange(scratch.count)
    link.send_states(Index.known(tokens.numpy(), handed.hidden_states.device), handed)
    return handed


class Rehearsal:
    """Carries out plans of scratch tokens on one stage, in the place of programs: all of their
    goes, by what this stage alone would choose.

    Args:
        scratch: has what enters a later stage.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def __call__(self, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
        """The plan of a batch. Returns what its last go has computed."""
        [plan] = batch.plans
        nothing = torch.zeros(0, device=batch.always.device.device)
        go: Go | None = first_go(layers, plan, batch)
        while go is not None:
            if layers.stage.is_first:
                computed = yield from (go.run or programs.run)(layers, batch)
            else:
                computed = yield from self._follow(layers, batch, go)
            go = go.then(go.answer(go.figures(nothing)).cpu().numpy())
        return computed

    def _follow(self, layers: LayerRunner, batch: Batch, go: Go) -> Chunks[Computed]:
        assert self._scratch.entering is not None
        active = go.tokens(batch)
        if active is None:
            active = _might_be_computed(batch)
        positions = batch.tokens.take(active).positions
        entering = self._scratch.entering.take(positions)
        state = layers.follow(active, entering, batch, go.watching)
        yield len(active) * len(layers.stack)
        return active.device, state


def _might_be_computed(batch: Batch) -> Index:
    """What is always computed, and the first tokens that the first stage might choose."""
    most = sum(plan.recipe.top_k for plan in batch.plans)
    chosen = torch.from_numpy(batch.may_be_chosen).nonzero()[:most, 0]
    index = torch.cat([batch.always.device.cpu(), chosen]).unique()
    return Index.known(index.numpy(), batch.always.device.device)
