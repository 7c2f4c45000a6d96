# SPDX-License-Identifier: Apache-2.0
"""The layers of a loaded model that hand a state on, and what a segment makes of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_segreuse.model.modules import UnsupportedModelError


class ReadTokens(Protocol):
    """What a layer reads in a step."""

    @property
    def layer(self) -> str:
        """vLLM's name of it."""

    @property
    def inputs(self) -> torch.Tensor:
        """`[tokens, channels]`, what enters the short convolution, of all tokens of the step."""

    @property
    def num_decoded(self) -> int:
        """How many of them, which stand in front, go by a kernel that nobody sees."""


Observer = Callable[[ReadTokens], None]


@dataclass(frozen=True)
class StateMap:
    """What a segment makes of what one layer hands on; kinds with more than last inputs add to it.

    Attributes:
        tail: `[inputs, channels]`, the last ones of the segment's short convolution.
    """

    tail: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All of it."""
        return tuple(getattr(self, part.name) for part in fields(self))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same, of changed parts."""
        named = [part.name for part in fields(self)]
        return replace(self, **{name: change(getattr(self, name)) for name in named})

    def compact(self) -> Self:
        """The same as it is kept, in tensors of its own."""
        return self.each(torch.clone)

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return sum(it.numel() * it.element_size() for it in self.parts)


SegmentMap = Sequence[StateMap]
"""Of all layers with a state, in order."""

HeldState = tuple[torch.Tensor, ...]
"""What a block has of one layer, as tensors of its own: the last inputs of its short convolution,
`[inputs, channels]`, and the state, `[heads, channels, other channels]`, where there is one."""

HeldStates = list[HeldState]
"""Of all layers with a state, in order: no more bytes than two maps of a segment take."""


class StateLayer(ABC):
    """A layer whose state is composed, with its cache; its subclasses are the kinds of such layers.

    All have a short convolution, of which the last inputs are handed on: those of a segment, or
    some in front of it, if it is shorter than the convolution.

    Args:
        name: vLLM's.
        group: which group of states has it, from 0 on.
        layer: vLLM's, its cache bound.

    Raises:
        UnsupportedModelError: states of this layer are not composed.
    """

    keeps: ClassVar[tuple[str, ...]] = ("last inputs",)
    """What vLLM keeps of a prompt, a tensor each."""

    unstudied: ClassVar[str | None] = None
    """Which models nobody has studied, if there is no study of this kind."""

    def __init__(self, name: str, group: int, layer: Any) -> None:
        if len(layer.kv_cache) != len(self.keeps):
            raise UnsupportedModelError(
                f"{name} keeps {len(layer.kv_cache)} tensors of a prompt, as with "
                f"--use-replayssm, and composed are its {' and its '.join(self.keeps)}"
            )
        self.name, self.group = name, group
        convolution, *others = layer.kv_cache
        if is_conv_state_dim_first():
            convolution = convolution.transpose(-1, -2)
        self._convolution: torch.Tensor = convolution
        self._kept: tuple[torch.Tensor, ...] = (convolution, *others)

    @abstractmethod
    def observed_by(self, observer: Observer | None) -> None:
        """From here on this one is shown what is read. None: nobody is."""

    @abstractmethod
    def round(self, block: int) -> None:
        """Round the state in a block as if what a map adds were all of it."""

    @property
    def num_inputs(self) -> int:
        """Of its short convolution that it keeps: all but the current one."""
        return int(self._convolution.shape[1])

    def nothing(self) -> StateMap:
        """The map of no tokens; tensors of its own."""
        return StateMap(self._convolution[0, :0].clone())

    def note(self, known: StateMap, seen: ReadTokens, first: int, stop: int) -> StateMap:
        """The map of a segment and of further tokens; `known` is used up.

        Args:
            known: of the segment, as far as it goes.
            seen: of these tokens and others.
            first, stop: tokens of the step, which it prefills.
        """
        tail = torch.cat((known.tail, seen.inputs[first:stop]))
        return replace(known, tail=tail[-self.num_inputs :].clone())

    @property
    def map_bytes(self) -> int:
        """Of a map as it is kept."""
        return replace(self.nothing(), tail=self._convolution[0]).compact().num_bytes

    def held(self, block: int) -> HeldState:
        """What is in a block; a copy."""
        return tuple(kept[block].clone() for kept in self._kept)

    def restore(self, block: int, held: HeldState) -> None:
        """Put it into a block."""
        for kept, part in zip(self._kept, held, strict=True):
            kept[block] = part

    def clear(self, block: int) -> None:
        """As in front of a prompt."""
        for kept in self._kept:
            kept[block] = 0

    def copy(self, source: int, target: int) -> None:
        """A block to another one."""
        for kept in self._kept:
            kept[target] = kept[source]

    def compose(self, block: int, segment: StateMap) -> None:
        """The state in a block becomes that behind a segment."""
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

    def observed_by(self, observer: Observer | None) -> None:
        """See there, of all layers."""
        for layer in self.layers:
            layer.observed_by(observer)

    @property
    def map_bytes(self) -> int:
        """Of the map of a segment."""
        return sum(layer.map_bytes for layer in self.layers)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is not known of answers behind their composed states."""
        kinds = dict.fromkeys(it.unstudied for it in self.layers if it.unstudied)
        return tuple(
            f"no trained model {kind} was studied, so what its answers are worth behind composed "
            "states is not known"
            for kind in kinds
        )

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

    def round(self, running: Sequence[int]) -> None:
        """The states in some blocks, as maps are."""
        for layer in self.layers:
            layer.round(running[layer.group])

    def compose(self, running: Sequence[int], segment: SegmentMap) -> None:
        """The states in some blocks become those behind a segment."""
        for layer, of_layer in zip(self.layers, segment, strict=True):
            layer.compose(running[layer.group], of_layer)
