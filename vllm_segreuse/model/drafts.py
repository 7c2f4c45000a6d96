# SPDX-License-Identifier: Apache-2.0
"""The draft of speculative decoding as vLLM has loaded it: a model of its own, or a head that is
given the target's hidden states.

A draft has KV of its own, in the same blocks as its target's. vLLM's proposer
(`v1/spec_decode/llm_base_proposer.py`) fills the slot of position p with

- a draft model: the token at p;
- EAGLE, EAGLE-3, multi-token prediction (MTP): the token at p + 1 and the target's state at p: what
  the target returns, or, of EAGLE-3, what enters some of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.model.modules import UnsupportedModelError


class Draft:
    """A loaded draft; for the start-up proof it has what a `DecoderStack` has.

    Args:
        drafter: vLLM's proposer.
        layers_by_name: all attention layers that vLLM knows by name.
        target: the decoder layers of the target.

    Attributes:
        attention: its `Attention` layers, by name in `names`.
        layers: modules in which its rotary modules are.
        takes_states: whether it is given the target's states, and ids shifted by one.
        auxiliary_layers: of the target, whose inputs these states are; empty: its output is.
        max_positions: tokens behind this position are not drafted for.
        given: states that `forward` hands to it `[tokens, channels]`.
        first: position that `forward` gives to position 0.

    Raises:
        UnsupportedModelError: it is given states that a pass does not compute.
    """

    def __init__(
        self, drafter: Any, layers_by_name: Mapping[str, nn.Module], target: DecoderStack
    ) -> None:
        model = drafter.model
        self.model: nn.Module = model.unwrap() if hasattr(type(model), "unwrap") else model
        self.names = sorted(drafter._draft_attn_layer_names)
        self.attention = [layers_by_name[name] for name in self.names]
        self.layers: list[nn.Module] = [self.model]
        self.takes_states = bool(drafter.pass_hidden_states_to_model)
        uses_auxiliary = drafter.method == "eagle3" and drafter.eagle3_use_aux_hidden_state
        self.auxiliary_layers = target.auxiliary_layers if uses_auxiliary else ()
        self._combines = drafter.method == "eagle3"
        config = drafter.draft_model_config
        self.max_positions = int(config.max_model_len)
        self.given: torch.Tensor | None = None
        self.first = 0
        if uses_auxiliary and not all(0 <= i < len(target) for i in self.auxiliary_layers):
            raise UnsupportedModelError(
                f"the draft is given what leaves the last of {len(target)} layers "
                f"({self.auxiliary_layers}), which a pass does not compute"
            )

    def combined(self, states: torch.Tensor) -> torch.Tensor:
        """What of the target's states `[tokens, channels]` is handed to the draft."""
        if not self._combines:
            return states
        combined: torch.Tensor = self.model.combine_hidden_states(states)
        return combined

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor | None
    ) -> None:
        """Write the KV of these tokens; runs in a forward context, with `skip_compiled=True`.

        Args:
            token_ids, positions: int64 `[tokens]`.
            states: combined ones, of drafts that take them.
        """
        given = {"hidden_states": states} if self.takes_states else {}
        self.model(input_ids=token_ids, positions=positions, **given)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """The same, with the states that it was given before."""
        given = None if self.given is None else self.given.clone()  # drafts change theirs in place
        self.compute(token_ids, positions + self.first, given)
