# SPDX-License-Identifier: Apache-2.0
"""The layers of a loaded model that hand a state on, and what a segment makes of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_segreuse.compat.gdn_attention import Scan


_KEPT = torch.bfloat16
"""The type of what is kept of a map."""


@dataclass(frozen=True)
class StateMap:
    """What a segment makes of the state of one layer: `S_out = product S_in + added`.

    Attributes:
        product: `[heads, channels, channels]`, the matrix of each head; or `[heads, 1, 1]`, where
            that is a number times the unit matrix.
        added: as a state: `[heads, channels, other channels]`.
        tail: `[inputs, channels]`, the last ones of the segment's short convolution.
    """

    product: torch.Tensor
    added: torch.Tensor
    tail: torch.Tensor

    @property
    def is_by_numbers(self) -> bool:
        """Whether a head has a number for a matrix."""
        return self.product.shape[1:] == (1, 1)

    def compact(self) -> StateMap:
        """The same in bfloat16, as it is kept: that rounds less than the kernel does by itself.
        Single numbers take no room, and stay."""
        product = self.product.clone() if self.is_by_numbers else self.product.to(_KEPT)
        return StateMap(product, self.added.to(_KEPT), self.tail.clone())

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return sum(it.numel() * it.element_size() for it in (self.product, self.added, self.tail))


SegmentMap = Sequence[StateMap]
"""Of all layers with a state, in order."""


class HeldState(NamedTuple):
    """The state of one layer, as tensors of its own.

    Attributes:
        state: `[heads, channels, other channels]`.
        inputs: `[inputs, channels]`, the last ones of the short convolution.
    """

    state: torch.Tensor
    inputs: torch.Tensor

    def rounded(self) -> HeldState:
        """As if what a map adds were all of it."""
        return self._replace(state=self.state.to(_KEPT).to(self.state.dtype))


HeldStates = list[HeldState]
"""Of all layers with a state, in order: no more bytes than two maps of a segment take."""


class StateLayer(ABC):
    """A layer whose state is composed, with its cache; its subclasses are the kinds of such layers.

    Args:
        name: vLLM's.
        group: which group of states has it, from 0 on.
        convolution: `[blocks, inputs, channels]`, the last inputs of its short convolution.
        states: `[blocks, heads, channels, other channels]`.

    Raises:
        UnsupportedModelError: states of this layer are not composed.
    """

    unknown: ClassVar[str | None] = None
    """What is not known of answers behind composed states of this kind; None: there is a study."""

    def __init__(
        self, name: str, group: int, convolution: torch.Tensor, states: torch.Tensor
    ) -> None:
        self.name, self.group = name, group
        self._convolution, self._states = convolution, states
        self.check(name, states)

    @classmethod
    @abstractmethod
    def check(cls, name: str, states: torch.Tensor) -> None:
        """Refuse states of another kind.

        Raises:
            UnsupportedModelError: naming the layer.
        """

    @abstractmethod
    def unit(self) -> torch.Tensor:
        """The product of no tokens, float32; a tensor of its own."""

    @abstractmethod
    def scan_again(self, scan: Scan, part: slice, state: torch.Tensor, valued: bool) -> None:
        """Run vLLM's kernel once more on some of the tokens that a step prefills.

        Args:
            scan: of the step.
            part: which of these tokens.
            state: float32, added to or, without values, multiplied; it is changed in place.
            valued: with the tokens' values, or with zeros.
        """

    @property
    def num_inputs(self) -> int:
        """Of its short convolution that it keeps: all but the current one."""
        return int(self._convolution.shape[1])

    def nothing(self) -> StateMap:
        """The map of no tokens; tensors of its own."""
        added = torch.zeros_like(self._states[0], dtype=torch.float32)
        return StateMap(self.unit(), added, self._convolution[0, :0].clone())

    def note(self, known: StateMap, scan: Scan, first: int, stop: int) -> StateMap:
        """The map of a segment and of further tokens; `known` is used up.

        Args:
            known: of the segment, as far as it goes.
            scan: of these tokens and others.
            first, stop: tokens of the step, which it prefills.
        """
        part = slice(first - scan.num_decoded, stop - scan.num_decoded)
        self.scan_again(scan, part, known.product, valued=False)
        self.scan_again(scan, part, known.added, valued=True)
        tail = torch.cat((known.tail, scan.inputs[first:stop]))
        return StateMap(known.product, known.added, tail[-self.num_inputs :].clone())

    @property
    def map_bytes(self) -> int:
        """Of a map as it is kept."""
        one = self.nothing()
        return StateMap(one.product, one.added, self._convolution[0]).compact().num_bytes

    def held(self, block: int) -> HeldState:
        """What is in a block; a copy."""
        return HeldState(self._states[block].clone(), self._convolution[block].clone())

    def restore(self, block: int, held: HeldState) -> None:
        """Put it into a block."""
        self._states[block] = held.state
        self._convolution[block] = held.inputs

    def clear(self, block: int) -> None:
        """As in front of a prompt."""
        self._states[block] = 0
        self._convolution[block] = 0

    def copy(self, source: int, target: int) -> None:
        """A block to another one."""
        self._states[target] = self._states[source]
        self._convolution[target] = self._convolution[source]

    def compose(self, block: int, segment: StateMap) -> None:
        """The state in a block becomes that behind a segment."""
        state, product, added = self._states[block], segment.product.float(), segment.added.float()
        if segment.is_by_numbers:
            state.copy_(torch.addcmul(added, product, state.float()))
        else:
            state.copy_(torch.baddbmm(added, product, state.float()))
        inputs = torch.cat((self._convolution[block], segment.tail))
        self._convolution[block] = inputs[-self.num_inputs :]


class StateLayers:
    """All of a model's, in the order of their groups.

    Args:
        layers: of it.
        num_groups: KV cache groups that they are in.
    """

    def __init__(self, layers: Sequence[StateLayer], num_groups: int) -> None:
        self.layers = layers
        self.num_groups = num_groups
        self.index = {layer.name: index for index, layer in enumerate(layers)}

    @property
    def map_bytes(self) -> int:
        """Of the map of a segment."""
        return sum(layer.map_bytes for layer in self.layers)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is not known of answers behind their composed states."""
        return tuple(dict.fromkeys(it.unknown for it in self.layers if it.unknown))

    def begin(self, running: Sequence[int], before: Sequence[int]) -> None:
        """States of a plan are those in front of it.

        Args:
            running: its block in each group.
            before: the block with the state in front, in each group; none: the prompt begins.
        """
        for layer in self.layers:
            if before:
                layer.copy(before[layer.group], running[layer.group])
            else:
                layer.clear(running[layer.group])

    def held(self, running: Sequence[int]) -> HeldStates:
        """The states in some blocks, a block of each group; copies."""
        return [layer.held(running[layer.group]) for layer in self.layers]

    def restore(self, running: Sequence[int], held: HeldStates) -> None:
        """Put states that were held into some blocks."""
        for layer, of_layer in zip(self.layers, held, strict=True):
            layer.restore(running[layer.group], of_layer)

    def compose(self, running: Sequence[int], segment: SegmentMap) -> None:
        """The states in some blocks become those behind a segment."""
        for layer, of_layer in zip(self.layers, segment, strict=True):
            layer.compose(running[layer.group], of_layer)
