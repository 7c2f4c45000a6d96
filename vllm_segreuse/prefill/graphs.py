# SPDX-License-Identifier: Apache-2.0
"""Passes by the piecewise CUDA graphs that vLLM has captured of the model.

They hold all of the model but attention, which stays ours, and spare the host what starting each
kernel takes: in passes of few tokens that is longer than the device works.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_segreuse.compat.model_runner import CapturedGraphs
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.prefill.tokens import TokenTable


class CudaGraphs:
    """Runs the whole model on tokens of a pass, padded to the size of a graph.

    Args:
        stack: the model's decoder layers.
        captured: the graphs.
    """

    def __init__(self, stack: DecoderStack, captured: CapturedGraphs) -> None:
        self._stack = stack
        self._captured = captured
        self._least = 0
        self._is_held = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending."""
        return self._captured.sizes

    def size_for(self, tokens: TokenTable) -> int:
        """Tokens of the smallest graph that has room for these; 0: there is none, or none may run
        now."""
        if self._is_held:
            return 0
        at = bisect.bisect_left(self.sizes, max(len(tokens), self._least))
        return self.sizes[at] if at < len(self.sizes) else 0

    @contextmanager
    def of_at_least(self, size: int) -> Iterator[None]:
        """Meanwhile passes are padded to so many tokens, as far as they have fewer."""
        self._least = size
        try:
            yield
        finally:
            self._least = 0

    @contextmanager
    def after_forward(self) -> Iterator[None]:
        """Meanwhile no graph runs that would overwrite what a step has yet to sample from."""
        self._is_held = not self._captured.sampled_first
        try:
            yield
        finally:
            self._is_held = False

    def forward(self, tokens: TokenTable, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What `DecoderStack.forward_for_drafts` returns, by the graph of `size` tokens.

        Runs in the forward context of that graph. What the graph returns is overwritten by the next
        one.
        """
        count = len(tokens)
        with self._lent(size) as (token_ids, positions):
            token_ids[:count], positions[:count] = tokens.token_ids, tokens.positions
            token_ids[count:], positions[count:] = 0, 0
            hidden_states, entering = self._stack.forward_of(token_ids, positions)
        return hidden_states[:count].clone(), [each[:count].clone() for each in entering]

    @contextmanager
    def _lent(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What the graph reads. The runner has laid out its own step there, and finds it again,
        also behind a pass that fails: its prompt is then computed by that step."""
        token_ids, positions = self._captured.token_ids[:size], self._captured.positions[:size]
        kept = token_ids.clone(), positions.clone()
        try:
            yield token_ids, positions
        finally:
            token_ids[:], positions[:] = kept
