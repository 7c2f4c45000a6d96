# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU kernels for experts, each rank with its own share of these: a stand-in for tests.

With `--enable-expert-parallel` a rank has some of the experts, and a map from all of them to its
own (-1: another rank's). `CPUUnquantizedExperts.apply` (vLLM 0.32 and 0.33,
`model_executor/layers/fused_moe/experts/cpu_moe.py`) is given the map and does not look at it: it
takes the number of an expert among all for that of one of its own, and reads beyond its weights.
Here the map is applied before. The kernels of GPUs take the map themselves.

Importing this module is enough; engines name `Experts` as their `worker_extension_cls`, so that
their workers do.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tests.e2e.ranks import Breaking

_apply = CPUUnquantizedExperts.apply
_SIGNATURE = inspect.signature(_apply)


_spoils = False


class Experts(Breaking):
    """What vLLM adds to its workers."""

    def spoil_on_rank(self, rank: int) -> None:
        """Let the experts of one rank compute NaN, the next time only."""
        global _spoils
        _spoils = self.rank == rank  # type: ignore[attr-defined]


def _with_map(*args: Any, **kwargs: Any) -> None:
    given = _SIGNATURE.bind(*args, **kwargs)
    experts, ids = given.arguments["expert_map"], given.arguments["topk_ids"]
    if experts is not None:
        own = experts[ids.long()]
        given.arguments["topk_ids"] = own.clamp(min=0).to(torch.int32).contiguous()
        weights = given.arguments["topk_weights"]
        given.arguments["topk_weights"] = torch.where(own < 0, 0.0, weights).contiguous()
    _apply(*given.args, **given.kwargs)
    global _spoils
    if _spoils:
        _spoils = False
        given.arguments["output"].fill_(torch.nan)


CPUUnquantizedExperts.apply = _with_map
