# SPDX-License-Identifier: Apache-2.0
"""What flows between decoder layers, and what each is given beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass
class LayerState:
    """What flows between decoder layers: tensors `[tokens, hidden]`; `residual` may be absent."""

    hidden_states: torch.Tensor
    residual: torch.Tensor | None

    @property
    def stream(self) -> torch.Tensor:
        """The residual stream: what the next layer adds up before it does anything else."""
        if self.residual is None:
            return self.hidden_states
        return self.hidden_states + self.residual

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that vLLM's models give them where they hand them to another stage."""
        named = {"hidden_states": self.hidden_states}
        return named if self.residual is None else named | {"residual": self.residual}

    def summed(self) -> LayerState:
        """The residual stream alone, half as much, in the place of the hidden states."""
        if self.residual is None:
            return self
        return LayerState(self.hidden_states.add_(self.residual), None)

    def take(self, index: torch.Tensor | slice) -> LayerState:
        """The states of the given rows."""
        return LayerState(
            self.hidden_states[index], None if self.residual is None else self.residual[index]
        )

    def kept(self, index: torch.Tensor, at_once: int) -> LayerState:
        """The states of some rows where others were, so that they are never held twice: these are
        lost.

        Args:
            index: ascending.
            at_once: rows that are read before they are written.
        """
        for tensor in (self.hidden_states, self.residual):
            if tensor is not None:
                for first in range(0, len(index), at_once):
                    rows = index[first : first + at_once]
                    tensor[first : first + len(rows)] = tensor[rows]
        return self.take(slice(0, len(index)))

    def followed_by(self, other: LayerState) -> LayerState:
        """The states of these tokens, and then of others, from the same layer."""
        hidden_states = torch.cat([self.hidden_states, other.hidden_states])
        if self.residual is None or other.residual is None:
            return LayerState(hidden_states, None)
        return LayerState(hidden_states, torch.cat([self.residual, other.residual]))

    def clone(self) -> LayerState:
        """A copy: layers change theirs in place."""
        return LayerState(
            self.hidden_states.clone(), None if self.residual is None else self.residual.clone()
        )


class LayerInputs(NamedTuple):
    """What decoder layers are given of a chunk of tokens beside their state.

    Attributes:
        positions: `[tokens]`, or of each row.
        further: the other arguments of each layer, as the model's own forward hands them over; of
            one layer alone if they are those of all.
    """

    positions: torch.Tensor
    further: Sequence[Mapping[str, object]]

    def of(self, layer: int) -> Mapping[str, object]:
        """The other arguments of a layer."""
        return self.further[layer if len(self.further) > 1 else 0]


class Collected:
    """States of chunks, put where they belong among all tokens: never held twice.

    Args:
        count: how many tokens there are.
        before: what entered where the chunks come from; each chunk takes the place of its own.
    """

    def __init__(self, count: int, before: LayerState | None = None) -> None:
        self._count = count
        self.state = before or LayerState(torch.empty(0), None)

    def add(self, part: slice, chunk: LayerState) -> None:
        """The state of tokens `part`."""
        if len(chunk.hidden_states) == self._count:
            self.state = chunk
            return
        if part.start == 0:
            before, residual = self.state, None
            if chunk.residual is not None:
                residual = self._room(chunk.residual, before.residual)
            hidden_states = self._room(chunk.hidden_states, before.hidden_states)
            self.state = LayerState(hidden_states, residual)
        residual, kept = chunk.residual, self.state.hidden_states.untyped_storage()
        if residual is not None and residual.untyped_storage().data_ptr() == kept.data_ptr():
            residual = residual.clone()  # a layer may add to what it was given, and return it so
        self.state.hidden_states[part] = chunk.hidden_states
        if residual is not None:
            assert self.state.residual is not None
            self.state.residual[part] = residual

    def _room(self, chunk: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        shape = self._count, *chunk.shape[1:]
        if before is not None and before.shape == shape and before.dtype == chunk.dtype:
            return before
        return chunk.new_empty(shape)
