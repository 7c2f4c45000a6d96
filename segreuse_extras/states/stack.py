# SPDX-License-Identifier: Apache-2.0
"""The loaded model as proofs and passes of states see it: as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.positions import position_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StateStack:
    """A model whose layers run by its own forward only.

    Args:
        model: as loaded.
        attention: its attention layers, by name; each in a decoder layer of its own.
        vllm_config: the engine's.
        block_size: tokens per block.

    Attributes:
        layers: decoder layers with attention.
        attention: that of each.
        num_layers: of the model, also those that hand a state on.

    Raises:
        UnsupportedModelError: its decoder layers are not to be found, or it numbers the tokens of a
            text otherwise than one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, nn.Module],
        vllm_config: VllmConfig,
        block_size: int,
    ) -> None:
        self._model = model
        self._position_rows = position_rows(model, vllm_config.model_config)
        self.block_size = block_size
        self.num_layers = int(vllm_config.model_config.get_total_num_hidden_layers())
        wanted = {id(layer) for layer in attention.values()}
        for candidate in model.modules():
            if not isinstance(candidate, nn.ModuleList) or len(candidate) != self.num_layers:
                continue
            found = [(layer, it) for layer in candidate for it in _of(layer, wanted)]
            if len(found) == len(wanted):
                self.layers = [layer for layer, _ in found]
                self.attention = [it for _, it in found]
                return
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {self.num_layers} decoder layers with its "
            f"{len(wanted)} attention layers"
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's own, on consecutive tokens; what leaves its last layer and norm."""
        if self._position_rows is not None:
            positions = positions.expand(self._position_rows, -1)
        hidden = self._model(
            input_ids=token_ids.to(torch.int32, copy=True), positions=positions.clone()
        )
        assert isinstance(hidden, torch.Tensor)
        return hidden


def _of(layer: nn.Module, wanted: set[int]) -> list[nn.Module]:
    return [module for module in layer.modules() if id(module) in wanted]
