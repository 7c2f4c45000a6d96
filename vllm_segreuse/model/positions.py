# SPDX-License-Identifier: Apache-2.0
"""Positions as vLLM's runner gives them to a model: one row, or several with M-RoPE.

M-RoPE numbers tokens by time, height and width. Text has the same number in all of them, and vLLM's
`MRotaryEmbedding` then rotates as plain RoPE does: a pass over prompts of text gives one row. Of
images, see `plan/images.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_segreuse.model.modules import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_SAMPLE_TOKENS = 64


def position_rows(model: nn.Module, config: ModelConfig) -> int | None:
    """Rows of positions that the model takes; None: one, without a dimension of its own.

    The model itself is asked for the positions of a text prompt, as in `_init_mrope_positions` of
    vLLM's `v1/worker/gpu_model_runner.py`.

    Raises:
        UnsupportedModelError: text is not numbered from zero on in every row.
    """
    if not config.uses_mrope:
        return None
    name = type(model).__name__
    numbering = getattr(model, "get_mrope_input_positions", None)
    if numbering is None:
        raise UnsupportedModelError(f"{name} gives no multimodal rotary positions (M-RoPE)")
    count = torch.arange(_SAMPLE_TOKENS)
    rows, behind = numbering((count + 1).tolist(), [])
    rows = torch.as_tensor(rows)
    if behind or not torch.equal(rows, count.expand(len(rows), -1)):
        raise UnsupportedModelError(f"{name} does not number the tokens of a text one by one")
    return len(rows)
