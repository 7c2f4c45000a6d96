# SPDX-License-Identifier: Apache-2.0
"""Queries and keys that a model gives by head (LFM2) are turned as those that it gives in a row.

On CPUs vLLM's kernel (0.32, and 0.33 calls it alike) takes the dimension before the last for
tokens: of `[tokens, heads, channels]` it turns the wrong ones by the wrong angles. So a model that
is run eagerly answers wrongly, with this plugin or without. Where vLLM compiles, rotations are
plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_segreuse.model.rotary import MODULES


def turn_rows(layers: list[nn.Module]) -> None:
    """From here on rotary modules of these decoder layers are given rows, and leave rows, which
    attention takes as well."""
    found = (it for layer in layers for it in layer.modules() if isinstance(it, MODULES))
    for module in dict.fromkeys(found):  # layers share one
        module.register_forward_pre_hook(_in_rows)


def _in_rows(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        it.flatten(1) if isinstance(it, torch.Tensor) and it.dim() == 3 else it for it in given
    )
