# SPDX-License-Identifier: Apache-2.0
"""Plans that are computed together, as flat tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_segreuse.cache.plan import ReusePlan
from vllm_segreuse.prefill.rows import TokenTable
from vllm_segreuse.prefill.selection import choose


class Batch:
    """Tokens `[start, stop)` of plans with one program, as flat tensors.

    Behind them stands the token at `stop`, where a plan asks for it: always computed, and a probe.

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
        last = [[] if plan.next_token is None else [plan.next_token] for plan in plans]
        self._lengths = [
            plan.num_tokens + len(more) for plan, more in zip(plans, last, strict=True)
        ]
        request = np.repeat(np.arange(len(plans)), self._lengths)
        positions = np.concatenate(
            [np.arange(p.start, p.start + n) for p, n in zip(plans, self._lengths, strict=True)]
        )
        slots = tables[request, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        def joined(parts: list[np.ndarray], behind: list[list[Any]], dtype: type) -> torch.Tensor:
            both = [part for pair in zip(parts, behind, strict=True) for part in pair]
            return tensor(np.concatenate([np.asarray(part, dtype) for part in both]))

        true = [[True] * len(more) for more in last]
        self.tokens = TokenTable(
            joined([p.token_ids for p in plans], last, np.int64),
            tensor(positions),
            tensor(request),
            tensor(slots),
        )
        self.always = joined([p.recipe.always for p in plans], true, np.bool_)
        self.probes = joined([p.recipe.probes for p in plans], true, np.bool_)
        self.bounds = np.concatenate([[0], np.cumsum(self._lengths)])
        self.block_tables = tensor(tables)

    def choose(
        self, scores: torch.Tensor, excluded: torch.Tensor, top_k: list[int]
    ) -> torch.Tensor:
        """Flat indices, ascending, of each plan's tokens with the largest scores.

        Args:
            scores: float32 `[tokens]`.
            excluded: bool `[tokens]`: tokens that are no candidates.
            top_k: how many of each plan; the most of each, where its recipe has a `least_share`.
        """
        candidates = scores.masked_fill(excluded, float("-inf"))
        least_share = self.plans[0].recipe.least_share
        return choose(list(candidates.split(self._lengths)), top_k, least_share)

    def num_active(self, active: torch.Tensor) -> dict[str, int]:
        """How many of these flat indices each plan has, by request; waits for the device."""
        counts = torch.bincount(self.tokens.request[active], minlength=len(self.plans)).tolist()
        return {plan.request_id: n for plan, n in zip(self.plans, counts, strict=True)}
