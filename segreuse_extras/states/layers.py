# SPDX-License-Identifier: Apache-2.0
"""The layers of a loaded model that hand a state on, and what a segment makes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.model.modules import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class StateMap:
    """What a segment makes of the state of one layer: `S_out = product @ S_in + added`.

    Attributes:
        product, added: `[heads, channels, channels]`; keys' channels first, then values'.
        tail: `[inputs, channels]`, the last ones of the segment's short convolution.
    """

    product: torch.Tensor
    added: torch.Tensor
    tail: torch.Tensor

    def compact(self) -> StateMap:
        """The same in bfloat16, as it is kept: that rounds less than the kernel does by itself."""
        kept = torch.bfloat16
        return StateMap(self.product.to(kept), self.added.to(kept), self.tail.clone())

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return sum(it.numel() * it.element_size() for it in (self.product, self.added, self.tail))


SegmentMap = Sequence[StateMap]
"""Of all layers with a state, in order."""


class HeldState(NamedTuple):
    """The state of one layer, as tensors of its own.

    Attributes:
        state: `[heads, channels, channels]`.
        inputs: `[inputs, channels]`, the last ones of the short convolution.
    """

    state: torch.Tensor
    inputs: torch.Tensor


HeldStates = list[HeldState]
"""Of all layers with a state, in order: as many bytes as the map of one segment."""


class StateLayer:
    """One of vLLM's layers of the gated delta rule, its cache bound.

    Args:
        name: vLLM's.
        layer: vLLM's.
        group: which group of states has it, from 0 on.

    Raises:
        UnsupportedModelError: states of this layer are not composed.
    """

    def __init__(self, name: str, layer: Any, group: int) -> None:
        self.name, self.group = name, group
        if type(layer) is not QwenGatedDeltaNetAttention:
            raise UnsupportedModelError(
                f"{name} is {type(layer).__name__}, and states are composed of "
                "QwenGatedDeltaNetAttention only"
            )
        convolution, states = layer.kv_cache
        if states.dtype != torch.float32 or states.shape[-1] != states.shape[-2]:
            raise UnsupportedModelError(
                f"{name} has states of {states.dtype} {tuple(states.shape[1:])}; composed are "
                "those in float32, of keys and values of as many channels"
            )
        self._convolution: torch.Tensor = convolution
        if is_conv_state_dim_first():
            self._convolution = convolution.transpose(-1, -2)
        self._states: torch.Tensor = states

    @property
    def num_inputs(self) -> int:
        """Of its short convolution that it keeps: all but the current one."""
        return int(self._convolution.shape[1])

    def nothing(self) -> StateMap:
        """The map of no tokens; tensors of its own."""
        heads, channels, _ = self._states.shape[1:]
        unit = torch.eye(channels, device=self._states.device).repeat(heads, 1, 1)
        return StateMap(unit, torch.zeros_like(unit), self._convolution[0, :0].clone())

    @property
    def map_bytes(self) -> int:
        """Of a map as it is kept."""
        one = self.nothing()
        tail = self._convolution[0]
        return StateMap(one.product, one.added, tail).compact().num_bytes

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
        state = self._states[block]
        state.copy_(torch.baddbmm(segment.added.float(), segment.product.float(), state))
        self._convolution[block] = segment.tail


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

    @classmethod
    def of(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: KvGroup
    ) -> StateLayers:
        """Those of a loaded model.

        Raises:
            UnsupportedModelError: naming the first whose states are not composed.
        """
        known = vllm_config.compilation_config.static_forward_context
        found = [
            StateLayer(name, known[name], number)
            for number, index in enumerate(group.states)
            for name in kv_cache_config.kv_cache_groups[index].layer_names
        ]
        return cls(found, len(group.states))

    @property
    def map_bytes(self) -> int:
        """Of the map of a segment."""
        return sum(layer.map_bytes for layer in self.layers)

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
