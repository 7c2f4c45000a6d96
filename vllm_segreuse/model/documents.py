# SPDX-License-Identifier: Apache-2.0
"""Which models were trained on documents computed alone (KVLink, Block-Attention)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

KEY = "segreuse"
"""Of such a model's `config.json`: how its prompts are laid out."""


def sees_documents_alone(model_config: ModelConfig) -> bool:
    """Whether the model was trained so; what the key says is not looked at."""
    return getattr(model_config.hf_config, KEY, None) is not None
