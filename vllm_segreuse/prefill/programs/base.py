# SPDX-License-Identifier: Apache-2.0
"""What the modules of this folder give, and what the start-up proof is given."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.plan import Program

Computed = tuple[torch.Tensor, LayerState | None]
"""Flat indices of the tokens that the last layer was run on, and what entered it."""

SHORT_STRETCH, LONG_STRETCH = 7, 20
"""Tokens per stretch of a proof: new tokens are scattered queries, or rows (`attention.py`)."""


class ProofCase(NamedTuple):
    """A plan of the start-up proof, which has to reproduce the KV of the model's own forward.

    Attributes:
        program: how it is computed.
        top_k: tokens to choose, if the program chooses.
        stretch: tokens that are reused, tokens that are not, and so on.
    """

    program: Program
    top_k: int = 0
    stretch: int = SHORT_STRETCH
