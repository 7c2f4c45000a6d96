# SPDX-License-Identifier: Apache-2.0
"""What a question looks up: the attention that its last tokens pay, where layers attend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from segreuse_extras.states.messages import Placed
from vllm_segreuse.model.kv_format import kv_scales
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.policies.base import QUESTION_TOKENS
from vllm_segreuse.prefill.attention import Queries


class Question(Queries):
    """Tokens at the end of a prompt that are about to be computed.

    Attention is added up over queries, heads and layers, all of them: so the study chooses.

    Args:
        kv: the layers that attend.
        blocks: int32, the request's block table.
        first, stop: positions of the tokens.
    """

    def __init__(self, kv: Sequence[LayerKv], blocks: torch.Tensor, first: int, stop: int) -> None:
        asking = np.arange(max(first, stop - QUESTION_TOKENS), stop)
        super().__init__([layer.attention for layer in kv], asking - first, self._add)
        self._kv, self._blocks, self._stop = kv, blocks, stop
        self._unasked = len(kv) * len(asking)
        self._positions = torch.from_numpy(asking).to(blocks.device)
        self.paid = torch.zeros(stop, device=blocks.device)
        """float32, by position."""

    def _add(self, number: int, part: slice, queries: torch.Tensor) -> None:
        known = self._kv[number]
        layer = known.attention
        self._unasked -= len(queries)
        self.paid += known.kernels.token_scores(
            queries,
            self._positions[part],
            known.pages,
            known.layout.attended,
            self._blocks,
            self._stop,
            layer.impl.scale * kv_scales(layer).key,
            **known.softmax(),
        )

    @property
    def is_sound(self) -> bool:
        """Whether each layer has asked for all of these tokens, and what was paid are numbers."""
        return not self._unasked and bool(self.paid.isfinite().all())

    def to(self, segments: Sequence[Placed]) -> list[float]:
        """What is paid to each segment as a whole."""
        return [float(self.paid[it.first : it.stop].double().sum()) for it in segments]
