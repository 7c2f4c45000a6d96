# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of layers, AdamW for all else: small models learn in a fraction of the
steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as one, so that a trainer schedules, steps and saves them together.

    Args:
        model: of transformers, to be trained.
        matrix_rate: of Muon, for matrices that neither embed tokens nor give logits.
        rate: of AdamW.
        betas: of AdamW.
        weight_decay: of both.
    """

    def __init__(
        self,
        model: Any,
        matrix_rate: float,
        rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        embeddings = {id(module.weight) for module in (*ends, model.get_output_embeddings())}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2 and id(p) not in embeddings]
        inside = {id(p) for p in matrices}
        others = [p for p in trained if id(p) not in inside]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=weight_decay),
            torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=weight_decay),
        ]
        super().__init__(trained, {"lr": rate})
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of both."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._join()
