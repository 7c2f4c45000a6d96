# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of layers, AdamW for all else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Optimizer:
    """One step for the whole model: Muon where a parameter is a layer's matrix."""

    def __init__(
        self, model: nn.Module, matrix_rate: float, other_rate: float, weight_decay: float = 0.02
    ) -> None:
        """Rates are those of the schedule's top; `step` takes the share of it."""
        matrices: list[nn.Parameter] = []
        self._others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and "embed" not in name
            (matrices if is_matrix else self._others).append(parameter)
        self._parts: dict[str, torch.optim.Optimizer] = {
            "matrices": torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=weight_decay),
            "others": torch.optim.AdamW(
                self._others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0
            ),
        }
        self._rates = {"matrices": matrix_rate, "others": other_rate}

    def step(self, share: float) -> None:
        """Apply the gradients at `share` of the top rates, and clear them."""
        nn.utils.clip_grad_norm_(self._others, 1.0)
        for name, part in self._parts.items():
            for group in part.param_groups:
                group["lr"] = self._rates[name] * share
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What going on takes, for `torch.save`."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `state` returned, for a model of the same shape."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
