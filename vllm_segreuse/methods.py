# SPDX-License-Identifier: Apache-2.0
"""What serves the options of a request: who finds its segments, and what its policy computes of
them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_segreuse.cache.exact import ResidentFinder
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.image_finder import ImageFinder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.cache.planner import least_work
from vllm_segreuse.cache.tracked import Method
from vllm_segreuse.cache.turns import Turns
from vllm_segreuse.config import RequestOptions, SegReuseConfig, SimilarityOptions
from vllm_segreuse.plan import BoolArray, ModelLayers, Recipe, ReusePlan, Segments, for_similar
from vllm_segreuse.policies import POLICIES, WITHOUT_CHOICE, Situation

if TYPE_CHECKING:
    from vllm_segreuse.cache.similar.finder import SimilarFinder


class Methods:
    """One per engine.

    Args:
        config: the server's options.
        block_size: tokens of a block.
        layers: the model's.
        by_content: finds equal segments.
        by_similarity: finds similar ones, too, where the server has the option.
    """

    def __init__(
        self,
        config: SegReuseConfig,
        block_size: int,
        layers: ModelLayers,
        by_content: Finder,
        by_similarity: SimilarFinder | None,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self.layers = layers
        self._by_content = by_content
        self.by_similarity = by_similarity
        self.by_residence: Finder = ResidentFinder(block_size)
        self.turns = Turns()

    def finder(self, options: RequestOptions, images: PromptImages | None = None) -> Finder:
        """Who finds segments for a request.

        Args:
            images: of its prompt, if there are any.
        """
        if images is not None:
            is_exact = options.policy == "exact"
            return ImageFinder(self.by_residence if is_exact else self._by_content, images)
        if options.policy == "exact":
            return self.by_residence
        if self.by_similarity is None or not options.similarity:
            return self._by_content
        takes_cuts = options.policy in WITHOUT_CHOICE
        return self.by_similarity if takes_cuts else self.by_similarity.without_cuts()

    def method(self, options: RequestOptions, images: PromptImages | None, is_text: bool) -> Method:
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

    def finds_alike(self, one: RequestOptions, other: RequestOptions) -> bool:
        """Whether requests with these options find the same."""
        cuts = [bool(self._config.cuts) and it.policy in WITHOUT_CHOICE for it in (one, other)]
        return (
            cuts[0] is cuts[1]
            and (one.policy == "exact") is (other.policy == "exact")
            and one.recompute_once is other.recompute_once
            and one.weigh_turns is other.weigh_turns
        )

    def recipe(
        self,
        options: RequestOptions,
        work: Callable[[Recipe], int] | None,
        reused: BoolArray,
        segments: Segments,
    ) -> Recipe | None:
        """What a policy computes of what was found. None: that is no less work than to compute
        everything, where `work` counts it."""
        recipe = POLICIES[options.policy](
            Situation(
                reused=reused,
                segments=segments,
                block_size=self._block_size,
                num_layers=self.layers.count,
                recompute_ratio=options.recompute_ratio,
                dense_layers=options.dense_layers,
                overflow_tokens=options.overflow_tokens,
            )
        )
        everything = len(reused) * self.layers.count
        return None if work is not None and work(recipe) >= everything else recipe

    def work_of(self, options: RequestOptions) -> Callable[[Recipe], int] | None:
        """What counts the work of a recipe. None: a share that is given is taken as it is."""
        return self._work if options.recompute_ratio is None else None

    def later_turns(self) -> float:
        """Turns that a conversation is expected to have yet; see `cache/turns.py`."""
        return self.turns.later

    def _work(self, recipe: Recipe) -> int:
        """Layer-tokens of it, at most."""
        return recipe.program.cost(recipe.counts(recipe.top_k), self.layers)

    def computed_by(self, plan: ReusePlan, options: RequestOptions) -> ReusePlan | None:
        """The plan of a request with other options, if these find the same; see `ReusePlan`. None:
        they would reuse less of it, nothing, or more than was planned."""
        work = self.work_of(options)
        make_recipe = functools.partial(self.recipe, options, work)
        weighs_turns = options.weigh_turns and not options.recompute_once
        later = self.later_turns() if weighs_turns else 0.0
        halo = self.finder(options).halo
        pieces, recipe = least_work(
            make_recipe, work, plan.pieces, plan.start, plan.stop, later, halo
        )
        if recipe is None or len(pieces) < len(plan.pieces) or plan.left_out:
            return None
        recipe = recipe.fixing(plan.recipe.fixed)
        return plan.computed_by(for_similar(recipe, halo, plan.pieces, plan.start, plan.stop))

    def set_similarity(self, options: Mapping[str, Any]) -> None:
        """Search under other options of `similarity` from the next request on: what
        `vllm-segreuse calibrate --similarity` compares.

        Args:
            options: laid over the server's.

        Raises:
            ValueError: the server has no `similarity`, or one that these cannot be tried with.
        """
        of_server = self._config.similarity
        if self.by_similarity is None or of_server is None:
            raise ValueError("the server has no option `similarity`")
        wanted = SimilarityOptions.model_validate({**of_server.model_dump(), **options})
        if not set(wanted.cuts) <= set(of_server.cuts):
            raise ValueError(f"w_exact={wanted.w_exact} has other layers than {of_server.cuts}")
        self.by_similarity = self.by_similarity.under(wanted)

    def catch_up(self) -> None:
        """Index what was cached since, where similar segments are searched for."""
        if self.by_similarity is not None:
            self.by_similarity.store.catch_up()
