# SPDX-License-Identifier: Apache-2.0
"""Which tokens a layer attends to, and how its logits become weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class AttentionKind:
    """What distinguishes attention layers whose queries are scheduled alike.

    Attributes:
        window: most keys that a query attends to: its own, and those just before it; 0: all before
            it.
        chunk: a query attends to the keys before it from the last multiple of this position on; 0:
            to those before that, too.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; 0: they stay as they are.
        has_sinks: each head has one more logit, of no key, in its softmax.
    """

    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def sees_all(self) -> bool:
        """Whether queries attend to the whole prompt before them."""
        return not (self.window or self.chunk)


FULL = AttentionKind()
"""Of most models' layers."""


def kind_of(layer: nn.Module, max_model_len: int) -> AttentionKind:
    """The kind of one of vLLM's `Attention` layers.

    Args:
        layer: the layer.
        max_model_len: a window or a chunk of so many tokens hides none of them.
    """
    chunk = getattr(layer, "attention_chunk_size", None) or 0
    window = layer.sliding_window or 0
    return AttentionKind(
        window if window < max_model_len else 0,
        chunk if chunk < max_model_len else 0,
        float(of_impl(layer, "logits_soft_cap") or 0.0),
        of_impl(layer, "sinks") is not None,
    )


def of_impl(layer: nn.Module, name: str) -> Any:
    """An attribute of a layer's backend, or None; backends that are made of several
    (`v1/attention/backends/composite.py`) have it in their parts."""
    found = (getattr(part, name, None) for part in layer.impl.get_impl_variants())
    return next((value for value in found if value is not None), None)
