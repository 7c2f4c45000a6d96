# SPDX-License-Identifier: Apache-2.0
"""Plans that are computed together, as flat tensors."""

from __future__ import annotations

import numpy as np
import torch

from vllm_segreuse.cache.plan import ReusePlan
from vllm_segreuse.prefill.rows import TokenTable
from vllm_segreuse.prefill.selection import choose_top_k


class Batch:
    """Tokens `[start, stop)` of plans with one program, as flat tensors.

    Attributes:
        tokens: every token, by plan, then by position.
        always, probes: bool `[tokens]`; see `Recipe`.
        bounds: first token of each plan, and the end.
        block_tables: int32 `[plans, blocks]`.
    """

    def __init__(self, plans: list[ReusePlan], block_size: int, device: torch.device) -> None:
        self.plans = plans
        widest = max(len(plan.block_ids) for plan in plans)
        tables = np.zeros((len(plans), widest), dtype=np.int32)
        for row, plan in zip(tables, plans, strict=True):
            row[: len(plan.block_ids)] = plan.block_ids
        lengths = [plan.num_tokens for plan in plans]
        request = np.repeat(np.arange(len(plans)), lengths)
        positions = np.concatenate([np.arange(p.start, p.stop) for p in plans])
        slots = tables[request, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        ids = np.concatenate([p.token_ids for p in plans]).astype(np.int64)
        self.tokens = TokenTable(tensor(ids), tensor(positions), tensor(request), tensor(slots))
        self.always = tensor(np.concatenate([p.recipe.always for p in plans]))
        self.probes = tensor(np.concatenate([p.recipe.probes for p in plans]))
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.block_tables = tensor(tables)

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Parts of a tensor `[tokens]`, one for each plan."""
        return flat.split([plan.num_tokens for plan in self.plans])

    def choose(self, scores: list[torch.Tensor], top_k: list[int]) -> torch.Tensor:
        """Flat indices, ascending, of each plan's tokens with the largest scores."""
        chosen = choose_top_k(scores, top_k)
        firsts = self.bounds[:-1].tolist()
        return torch.cat([part + first for part, first in zip(chosen, firsts, strict=True)])
