# SPDX-License-Identifier: Apache-2.0
"""What a policy is given, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_segreuse.plan import BoolArray, IntArray, Program, Recipe, Segments, fates_of

TAIL_TOKENS = 64

QUESTION_TOKENS = 256
"""The most that are read as the question. What is asked stands at the end of the new text, behind
what a tool has answered."""

RATIO = 0.1
"""`recompute_ratio` of policies that have none of their own."""


@dataclass(frozen=True)
class Situation:
    """One request as a policy sees it.

    Attributes:
        reused: bool `[tokens]`: tokens behind the prefix hit whose KV is copied. The prompt's last
            token is not among them: vLLM itself computes that one.
        segments: runs of reused tokens, each computed in one sequence.
        block_size: tokens per KV block.
        num_layers: decoder layers of the model.
        recompute_ratio: share of the reused tokens to choose by score, 0..1; None: the policy's
            own.
        dense_layers: number of leading dense layers, or a share of the layers if below 1.
        overflow_tokens: tokens to recompute on either side of new text; None = one block.
    """

    reused: BoolArray
    segments: Segments
    block_size: int
    num_layers: int
    recompute_ratio: float | None
    dense_layers: float
    overflow_tokens: int | None

    @property
    def num_dense_layers(self) -> int:
        """`dense_layers` as a number of layers; a share means at least one layer."""
        if 0 < self.dense_layers < 1:
            return min(max(1, round(self.dense_layers * self.num_layers)), self.num_layers)
        return min(int(self.dense_layers), self.num_layers)

    @property
    def probes(self) -> BoolArray:
        """The new tokens; and the tail, when it is all reused and so has no query of its own."""
        probes = ~self.reused
        if not probes[-TAIL_TOKENS:].any():
            probes[-TAIL_TOKENS:] = True
        return probes

    @property
    def question(self) -> BoolArray:
        """The end of the last interval of new tokens; the tail, when it is all reused."""
        probes = self.probes
        if self.reused[-TAIL_TOKENS:].all():
            probes[:-TAIL_TOKENS] = False
            return probes
        last = int(np.flatnonzero(probes)[-1])
        before = np.flatnonzero(~probes[:last])
        first = int(before[-1]) + 1 if len(before) else 0
        probes[: max(first, last + 1 - QUESTION_TOKENS)] = False
        return probes

    @cached_property
    def spared(self) -> BoolArray:
        """Reused tokens whose context is the one that they were computed in: a policy has no reason
        to choose them. None, if all reused tokens are to be computed."""
        spared = np.zeros_like(self.reused)
        if self.recompute_ratio == 1:
            return spared
        extents = np.stack((self.segments.first, self.lengths), axis=1)
        for first, length in extents[self.segments.in_context]:
            spared[first : first + length] = True
        return spared

    @cached_property
    def lengths(self) -> IntArray:
        """Tokens of each segment, int32 `[segments]`: up to the next one, or to a new token."""
        if not len(self.segments.first):
            return np.zeros(0, np.int32)
        return np.add.reduceat(self.reused, self.segments.first, dtype=np.int32)

    def ratio(self, own: float = RATIO) -> float:
        """`recompute_ratio`, or the policy's own."""
        return own if self.recompute_ratio is None else self.recompute_ratio

    def budget(self) -> int:
        """Reused tokens that `ratio` lets be computed again."""
        return round(self.ratio() * int((self.reused & ~self.spared).sum()))

    def choosing(self, program: Program, always: BoolArray, probes: BoolArray, most: int) -> Recipe:
        """Tokens that are always computed, and at most so many others."""
        return Recipe.of(program, fates_of(always, probes, self.spared), most)


Policy = Callable[[Situation], Recipe]
