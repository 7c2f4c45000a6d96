# SPDX-License-Identifier: Apache-2.0
"""Boundary states: what entered some of the layers, of each token whose KV is in the cache.

                 layer 0 ... 7    cut 8   layer 8 ... L-1
    donor        KV               state   KV                by slot, written by whatever forward
                 │ moved            │
    plan         KV               state ► computed          by slot, read once all is in place

A state is the residual stream at a cut, before the layer's own norm. Rotations are applied within
attention only, so it needs none; but it depends on the context of its donor, as KV does. It lies at
the slot of its token, for as long as the KV there is of that token.

Whatever writes KV runs the decoder layers, vLLM's forward and our pass alike, and each cut's layer
reports what enters it. So a token that was computed at all layers, as every token of a donor was,
has a state at each cut. What is moved into a slot leaves no state there. Beside each state is the
position at which it was computed: one of another position is not the donor's, and is read as NaN,
which has the request computed in full (`executor.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.prefill.align import TokenCopies
from vllm_segreuse.prefill.tokens import upload

_NONE = -1
_POSITION = torch.int32


class BoundaryStates:
    """States of all slots of a KV cache, at some cuts; one per worker, equal on all ranks.

    Args:
        stack: the model's decoder layers; their modules report to this from here on.
        cuts: layers whose input is kept, ascending.
        num_slots: of the KV cache.
        hidden_size: channels of a state.
        dtype, device: of the model.

    Attributes:
        cuts: as given.
        states: of the model's dtype `[cuts, num_slots + 1, hidden_size]`; undefined where a slot
            has none.
        positions: int32 `[cuts, num_slots + 1]`, where in its request each state was computed; -1:
            the slot has none.
    """

    def __init__(
        self,
        stack: DecoderStack,
        cuts: Sequence[int],
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cuts = tuple(cuts)
        # One slot more: vLLM's padding has slot -1.
        shape = len(self.cuts), num_slots + 1
        self.states = torch.empty(*shape, hidden_size, dtype=dtype, device=device)
        self.positions = torch.full(shape, _NONE, dtype=_POSITION, device=device)
        for row, cut in enumerate(self.cuts):
            name = stack.attention[cut].layer_name
            stack.report_input(cut, partial(self._keep, row, name))

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return self.states.nbytes + self.positions.nbytes

    def _keep(self, row: int, layer_name: str, positions: torch.Tensor, state: LayerState) -> None:
        slots = slots_of_forward(layer_name)
        if slots is None:
            return
        stream = state.stream
        slots = slots[: len(stream)]
        self.states[row, slots] = stream[: len(slots)]
        self.positions[row, slots] = positions[: len(slots)].to(_POSITION)

    def move(self, copies: TokenCopies) -> None:
        """Put the donors' states beside the KV that was moved, where tokens enter.

        The other targets have no state from here on.
        """
        device = self.states.device
        self.positions[:, upload(copies.target_slots, device)] = _NONE
        for row, cut in enumerate(self.cuts):
            entering = copies.take(copies.stops == cut)
            if not len(entering):
                continue
            sources, targets, positions = (
                upload(array, device)
                for array in (entering.source_slots, entering.target_slots, entering.positions)
            )
            is_donors = self.positions[row, sources] == positions
            states = self.states[row, sources]
            self.states[row, targets] = states.masked_fill_(~is_donors[:, None], torch.nan)

    def at(self, cut: int, slots: torch.Tensor) -> torch.Tensor:
        """The states `[slots, hidden]` that `move` has put there."""
        return self.states[self.cuts.index(cut), slots]


def slots_of_forward(layer_name: str) -> torch.Tensor | None:
    """KV slots that the forward under way writes to, at a layer; None: no KV is written."""
    if not is_forward_context_available():
        return None
    slot_mapping = get_forward_context().slot_mapping
    assert isinstance(slot_mapping, dict), "micro-batching is refused"
    return slot_mapping.get(layer_name)
