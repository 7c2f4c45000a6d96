# SPDX-License-Identifier: Apache-2.0
"""What each policy computes of what was found: by the policies themselves, and the planner's own
choice (`scheduling/planner.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np

from vllm_segreuse.cache.finder import ContentFinder, Finder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import BoolArray, Counts, ModelLayers, Pieces, Recipe, Segments
from vllm_segreuse.policies import Situation
from vllm_segreuse.scheduling.methods import Method, Methods
from vllm_segreuse.scheduling.plan_maker import least_work

_T = TypeVar("_T")

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


class _SharedPieces(Pieces):
    """Pieces that several policies plan with: what each asks is worked out once."""

    @classmethod
    def of(cls, pieces: Pieces) -> _SharedPieces:
        return cls(**vars(pieces))

    def reused(self, start: int, stop: int) -> BoolArray:
        return self._once(("reused", start, stop), super().reused, start, stop)

    def segments(self, start: int) -> Segments:
        return self._once(("segments", start), super().segments, start)

    def where(self, kept: BoolArray | np.ndarray) -> Pieces:
        if kept is not self.in_context:
            return super().where(kept)
        return self._once("in context", lambda: self.of(super(_SharedPieces, self).where(kept)))

    def _once(self, key: Hashable, make: Callable[..., _T], *given: int) -> _T:
        known = vars(self).setdefault("_known", {})
        if key not in known:
            known[key] = make(*given)
        return cast(_T, known[key])


class _SharedMethods(Methods):
    """Policies with the same other options that are asked of the same pieces, one after the
    other."""

    def __init__(self, block_size: int, layers: ModelLayers, by_content: Finder) -> None:
        super().__init__(block_size, layers, by_content)
        self._last: Situation | None = None
        self._counts: dict[Recipe, Counts] = {}

    def forget(self) -> None:
        """Other pieces follow."""
        self._last = None
        self._counts.clear()

    def counts(self, recipe: Recipe) -> Counts:
        """Tokens of a recipe, by what is done with them."""
        if recipe not in self._counts:
            self._counts[recipe] = recipe.counts(recipe.top_k)
        return self._counts[recipe]

    def situation(self, options: PolicyOptions, reused: BoolArray, segments: Segments) -> Situation:
        if self._last is None or self._last.reused is not reused:
            self._last = super().situation(options, reused, segments)
        return self._last

    def _work(self, recipe: Recipe) -> int:
        return recipe.program.cost(self.counts(recipe), self.layers)


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
        self._shared = _SharedMethods(block_size, self.layers, finder)
        self.methods: dict[str, Method] = {
            name: self._shared.method(
                options.model_copy(update={"policy": name}), None, is_text=True
            )
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
        self._shared.forget()
        pieces = _SharedPieces.of(pieces)
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
        self._shared.forget()
        for name, method in self.methods.items():
            recipe = method.make_recipe(reused, segments)
            left[name] = (
                Left(tokens, 0, 0)
                if recipe is None
                else self._left(recipe, num_reused, tokens - len(reused))
            )
        return left

    def _left(self, recipe: Recipe, reused: int, behind: int) -> Left:
        counts = self._shared.counts(recipe)
        computed = recipe.program.cost(counts, self.layers) / self.layers.in_all + behind
        new = len(recipe.fates) - reused
        return Left(computed, reused, max(0, counts.always + counts.chosen - new))
