# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices (momentum, made orthogonal by Newton-Schulz steps), AdamW for all else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Coefficients of the quintic iteration, from Muon's description by Keller Jordan and others.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Optimizer:
    """One step for the whole model: Muon where a parameter is a layer's matrix."""

    def __init__(
        self, model: nn.Module, matrix_rate: float, other_rate: float, weight_decay: float = 0.02
    ) -> None:
        """Rates are those of the schedule's top; `step` takes the share of it."""
        self.matrix_rate = matrix_rate
        self.other_rate = other_rate
        self.weight_decay = weight_decay
        others = []
        # Matrices of one shape are stepped together: many small products are slow one by one.
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                self.groups.setdefault(parameter.shape, []).append(parameter)
            else:
                others.append(parameter)
        self.momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }
        self.others = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0)

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Apply the gradients at `share` of the top rates, and clear them."""
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self.momentum[shape].mul_(0.95).add_(gradient)
            update = orthogonal(gradient.add(momentum, alpha=0.95))
            rate = self.matrix_rate * share
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.weight_decay).add_(change, alpha=-rate * scale)
                parameter.grad = None
        for settings in self.others.param_groups:
            settings["lr"] = self.other_rate * share
            nn.utils.clip_grad_norm_(settings["params"], 1.0)
        self.others.step()
        self.others.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What going on takes, for `torch.save`."""
        return {"momentum": list(self.momentum.values()), "others": self.others.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `state` returned, for a model of the same shape."""
        for momentum, saved in zip(self.momentum.values(), state["momentum"], strict=True):
            momentum.copy_(saved)
        self.others.load_state_dict(state["others"])


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, of `[count, rows, columns]`."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    turned = x.shape[1] > x.shape[2]
    if turned:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    if turned:
        x = x.transpose(1, 2)
    return x.float()
