# SPDX-License-Identifier: Apache-2.0
"""What is known of one attention layer: where its KV lies, what turns, who attends to it, and by
which kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.pages import PageLayout, Part
from vllm_segreuse.model.attention_kind import FULL, AttentionKind, of_impl
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.rope import DeltaRope


@dataclass(frozen=True)
class LayerKv:
    """An attention layer of the loaded model.

    Attributes:
        attention: vLLM's `Attention` layer, KV cache bound.
        layout: where keys and values lie in its pages, as found (`kv_layout.py`).
        rope: how its keys turn with their position; None where they carry none (NoPE).
        kernels: those that take its pages.
        kind: what its tokens attend to.
        table: which of a request's block tables has its pages (`KvGroup.tables`).
    """

    attention: torch.nn.Module
    layout: PageLayout
    rope: DeltaRope | None
    kernels: Kernels
    kind: AttentionKind = FULL
    table: int = 0

    @property
    def pages(self) -> torch.Tensor:
        """Its flat pages, `[num_blocks, page_elements]`, in the type of what they hold."""
        return typed_pages(self.attention)

    @property
    def parts(self) -> list[Part]:
        """Keys and values, as the kernels take them."""
        rotation = None if self.rope is None else self.rope.rotation
        return [Part(self.layout.keys, rotation), Part(self.layout.values, None)]

    def softmax(self) -> dict[str, Any]:
        """What the kernels need to know of its softmax, beside the scale: as a rule, nothing."""
        arguments: dict[str, Any] = {}
        if self.kind.soft_cap:
            arguments["soft_cap"] = self.kind.soft_cap
        if self.kind.has_sinks:
            # Read anew each time: weights may be reloaded, and backends convert them.
            arguments["sinks"] = of_impl(self.attention, "sinks")
        return arguments

    def turns_like(self, other: LayerKv) -> bool:
        """Whether keys of both layers turn alike, or neither's do."""
        if self.rope is None or other.rope is None:
            return self.rope is other.rope
        return self.rope.same_as(other.rope)

    def moves_like(self, other: LayerKv) -> bool:
        """Whether one call of a kernel may move tokens of both layers."""
        own, others = self.pages, other.pages
        return (
            self.turns_like(other)
            and self.table == other.table
            and self.kernels == other.kernels
            and self.layout == other.layout
            and (own.dtype, own.stride(), own.device)
            == (others.dtype, others.stride(), others.device)
        )
