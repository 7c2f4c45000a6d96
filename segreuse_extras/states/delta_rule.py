# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (arXiv 2412.06464; Qwen3-Next, Qwen3.5): products are matrices.

With values of zero, and the unit matrix in the place of the state, vLLM's kernel leaves that
matrix; from no state, what a segment adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from segreuse_extras.states.recurrent import RecurrentLayer
from vllm_segreuse.model.modules import UnsupportedModelError

if TYPE_CHECKING:
    from vllm_segreuse.compat.gdn_attention import Scan


class DeltaRuleLayer(RecurrentLayer):
    """One of vLLM's `QwenGatedDeltaNetAttention`; of a state, keys' channels go before values'."""

    @classmethod
    def check(cls, name: str, states: torch.Tensor) -> None:
        """See there."""
        if states.dtype != torch.float32:
            raise UnsupportedModelError(
                f"{name} has states of {states.dtype}; composed are those in float32, as vLLM "
                "keeps them with --mamba-ssm-cache-dtype float32"
            )
        if states.shape[-1] != states.shape[-2]:
            raise UnsupportedModelError(
                f"{name} has states of {tuple(states.shape[1:])}; composed are those of keys and "
                "values of as many channels"
            )

    def unit(self) -> torch.Tensor:
        """See there."""
        heads, channels, _ = self._states.shape[1:]
        return torch.eye(channels, device=self._states.device).repeat(heads, 1, 1)

    def scan_again(self, scan: Scan, part: slice, state: torch.Tensor, valued: bool) -> None:
        """See there."""
        given = dict(scan.arguments)
        for name in ("query", "key", "value", "g", "beta"):
            given[name] = given[name][:, part].contiguous()
        if not valued:
            given["value"] = torch.zeros_like(given["value"])
        given["cu_seqlens"] = given["cu_seqlens"].new_tensor([0, part.stop - part.start])
        given["initial_state"] = state[None]
        given["initial_state_indices"] = given["initial_state_indices"].new_zeros(1)
        scan.original(**given)
