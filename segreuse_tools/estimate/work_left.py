# SPDX-License-Identifier: Apache-2.0
"""What each policy computes of what was found: by the policies themselves, and the planner's own
choice (`scheduling/planner.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import BoolArray, ModelLayers, Pieces, Recipe, Segments
from vllm_segreuse.scheduling.methods import Method, Methods
from vllm_segreuse.scheduling.planner import least_work

NEVER_BY_CONTENT = "exact"
"""Without a second tier it finds what prefix caching finds."""


class Left(NamedTuple):
    """Of one request.

    Attributes:
        computed: tokens, counted as (token, layer) pairs divided by the layers.
        reused: tokens.
        recomputed: of these, by the policy's budget.
    """

    computed: float
    reused: int
    recomputed: int


class Planned(NamedTuple):
    """What the first policy makes of a request.

    Attributes:
        pieces: that are copied.
        recipe: of the plan.
    """

    pieces: Pieces
    recipe: Recipe


class PolicyWork:
    """Policies that are compared.

    Args:
        policies: their names; the first one's plans decide what is cached.
        block_size: tokens per block.
        layers: of the model; what dense layers compute depends on it.
        options: of requests, but for the policy.
    """

    def __init__(
        self, policies: Sequence[str], block_size: int, layers: int, options: PolicyOptions
    ) -> None:
        self.layers = ModelLayers.of_full_attention(layers)
        self.min_reused_tokens = options.min_reused_tokens
        finder = ContentFinder(SegmentIndex(1, block_size), 0)  # is asked for nothing
        methods = Methods(block_size, self.layers, finder)
        self.methods: dict[str, Method] = {
            name: methods.method(options.model_copy(update={"policy": name}), None, is_text=True)
            for name in policies
        }

    def nothing(self, tokens: int) -> dict[str, Left]:
        """Of a request that reuses nothing behind its prefix hit.

        Args:
            tokens: behind it.
        """
        return dict.fromkeys(self.methods, Left(tokens, 0, 0))

    def plans(
        self, pieces: Pieces, start: int, stop: int, tokens: int
    ) -> tuple[Planned | None, dict[str, Left]]:
        """The first policy's plan, if it reuses anything; and what is left by each.

        Args:
            pieces: that were found.
            start, stop: of the plan.
            tokens: of the prompt.
        """
        first: Planned | None = None
        left: dict[str, Left] = {}
        for number, (name, method) in enumerate(self.methods.items()):
            kept, recipe = least_work(method.make_recipe, method.work, pieces, start, stop)
            if recipe is None or not len(kept):
                left[name] = Left(tokens - start, 0, 0)
                continue
            if not number:
                first = Planned(kept, recipe)
            left[name] = self._left(recipe, kept.num_tokens, tokens - stop)
        return first, left

    def of_segments(self, reused: BoolArray, segments: Segments, tokens: int) -> dict[str, Left]:
        """What is left of a prompt whose reused tokens are known otherwise.

        Args:
            reused: bool `[tokens in front of the last one]`.
            segments: of these.
            tokens: of the prompt, from `reused` on.
        """
        num_reused = int(np.count_nonzero(reused))
        if num_reused < self.min_reused_tokens:
            return self.nothing(tokens)
        left = {}
        for name, method in self.methods.items():
            recipe = method.make_recipe(reused, segments)
            left[name] = (
                Left(tokens, 0, 0)
                if recipe is None
                else self._left(recipe, num_reused, tokens - len(reused))
            )
        return left

    def _left(self, recipe: Recipe, reused: int, behind: int) -> Left:
        counts = recipe.counts(recipe.top_k)
        computed = recipe.program.cost(counts, self.layers) / self.layers.count + behind
        new = len(recipe.fates) - reused
        return Left(computed, reused, max(0, counts.always + counts.chosen - new))
