# SPDX-License-Identifier: Apache-2.0
"""What serves the options of a request: who finds its segments, and what its policy computes of
them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from vllm_segreuse.cache.exact import ResidentFinder
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import BoolArray, ModelLayers, Recipe, Segments
from vllm_segreuse.policies import POLICIES, Situation
from vllm_segreuse.scheduling.tracked import Method

FinderOf = Callable[[PolicyOptions, PromptImages | None, Finder], Finder]
"""See `Feature.finder`."""


class Methods:
    """One per engine.

    Args:
        block_size: tokens of a block.
        layers: the model's.
        by_content: finds equal segments.
        finders: of features; each takes the place of who would search, or wraps it.
    """

    def __init__(
        self,
        block_size: int,
        layers: ModelLayers,
        by_content: Finder,
        finders: Sequence[FinderOf] = (),
    ) -> None:
        self._block_size = block_size
        self.layers = layers
        self._by_content = by_content
        self._by_residence: Finder = ResidentFinder(block_size)
        self._finders = finders

    def finder(self, options: PolicyOptions, images: PromptImages | None = None) -> Finder:
        """Who finds segments for a request.

        Args:
            images: of its prompt, if there are any.
        """
        found = self._by_residence if options.policy == "exact" else self._by_content
        for finder in self._finders:
            found = finder(options, images, found)
        return found

    def method(self, options: PolicyOptions, images: PromptImages | None, is_text: bool) -> Method:
        """What a request with these options is searched for and computed by.

        Args:
            images: of its prompt, if there are any.
            is_text: whether all that it reuses may be computed as text; else nothing of what was
                found is left out.
        """
        work = self.work_of(options)
        return Method(
            options.policy,
            self.finder(options, images),
            functools.partial(self.recipe, options, work),
            options.min_reused_tokens,
            work if is_text else None,
            max_drift=math.inf if options.max_drift is None else options.max_drift,
        )

    def recipe(
        self,
        options: PolicyOptions,
        work: Callable[[Recipe], int] | None,
        reused: BoolArray,
        segments: Segments,
    ) -> Recipe | None:
        """What a policy computes of what was found. None: that is no less work than to compute
        everything, where `work` counts it."""
        recipe = POLICIES[options.policy](self.situation(options, reused, segments))
        everything = len(reused) * self.layers.in_all
        return None if work is not None and work(recipe) >= everything else recipe

    def situation(self, options: PolicyOptions, reused: BoolArray, segments: Segments) -> Situation:
        """What a policy is given of what was found."""
        return Situation(
            reused=reused,
            segments=segments,
            block_size=self._block_size,
            num_layers=self.layers.count,
            recompute_ratio=options.recompute_ratio,
            dense_layers=options.dense_layers,
            overflow_tokens=options.overflow_tokens,
        )

    def work_of(self, options: PolicyOptions) -> Callable[[Recipe], int] | None:
        """What counts the work of a recipe. None: a share that is given is taken as it is."""
        return self._work if options.recompute_ratio is None else None

    def _work(self, recipe: Recipe) -> int:
        """Layer-tokens of it, at most."""
        return recipe.program.cost(recipe.counts(recipe.top_k), self.layers)
