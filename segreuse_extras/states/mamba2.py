# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060; Granite 4 H, Nemotron-H, Falcon-H1): products are numbers.

All of a head's state fades alike: by `exp(A dt)` with each token, and with a segment by the product
of these. With values of zero vLLM's kernel multiplies by that whatever state it is given, of which
one channel is enough; from no state it leaves what the segment adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from segreuse_extras.states.recurrent import RecurrentLayer
from vllm_segreuse.model.modules import UnsupportedModelError

if TYPE_CHECKING:
    from vllm_segreuse.compat.gdn_attention import Scan

DTYPES = torch.float32, torch.bfloat16
"""Of states; the kernel itself computes in float32."""


class Mamba2Layer(RecurrentLayer):
    """One of vLLM's `MambaMixer2`. Channels of a head go first, then those of its state space."""

    unstudied: ClassVar[str | None] = "of Mamba-2"

    @classmethod
    def check(cls, name: str, states: torch.Tensor) -> None:
        """See there."""
        if states.dtype not in DTYPES:
            known = ", ".join(str(it).removeprefix("torch.") for it in DTYPES)
            raise UnsupportedModelError(
                f"{name} has states of {states.dtype}; composed are those in {known}"
            )

    def unit(self) -> torch.Tensor:
        """See there."""
        return torch.ones(self._states.shape[1], 1, 1, device=self._states.device)

    def scan_again(self, scan: Scan, part: slice, state: torch.Tensor, valued: bool) -> None:
        """See there."""
        # vLLM 0.33 has the kernel write states into the cache itself (`final_states_out`).
        of_cache = "final_states_out", "final_state_indices"
        given = {name: it for name, it in scan.arguments.items() if name not in of_cache}
        for name in ("x", "dt", "B", "C"):
            given[name] = given[name][part]
        if not valued:
            given["x"] = torch.zeros_like(given["x"][..., :1])
            given |= {name: given[name][..., :1] for name in ("B", "C")}
        given["out"] = torch.empty_like(given["x"], memory_format=torch.contiguous_format)
        # The kernel of CPUs goes by these bounds, not by the chunks of the others.
        given["cu_seqlens"] = given["cu_seqlens"].new_tensor([0, part.stop - part.start])
        given |= {"initial_states": state[None], "state_dtype": torch.float32}
        state.copy_(scan.original(**given)[0])
