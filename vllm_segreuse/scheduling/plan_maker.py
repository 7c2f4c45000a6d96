# SPDX-License-Identifier: Apache-2.0
"""The plan that a request gets of what was found for it: as its policy wants it, where that saves
work.

A plan has up to two parts. What follows the prefix hit without a hole in whole exact blocks is
restored (`cache/exact.py`); the finder searches behind it. Where it finds too little, the plan ends
with what is restored, and vLLM computes the rest as behind a prefix hit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.second_tier import keeping
from vllm_segreuse.plan import (
    NO_HALO,
    BoolArray,
    Halo,
    Pieces,
    Program,
    Recipe,
    Restoration,
    ReusePlan,
    Segments,
    for_similar,
)
from vllm_segreuse.scheduling.tracked import (
    BEHIND_FIRST_STAGE,
    IMAGES_IN_DENSE_LAYERS,
    NOTHING_SAVED,
    TrackedRequest,
)


class FoundPieces(NamedTuple):
    """What a plan is made of.

    Attributes:
        matches: all that is copied.
        exact_until: up to here, without a hole, it is whole exact blocks.
    """

    matches: Matches
    exact_until: int

    @property
    def restored(self) -> Pieces:
        """Of the exact blocks."""
        return self.matches.pieces.where(self._is_exact)

    @property
    def others(self) -> Matches:
        """What is behind them."""
        return keeping(self.matches, ~self._is_exact)

    def alone(self) -> FoundPieces:
        """Without what is behind them."""
        pieces = self.restored
        return self._replace(matches=Matches(pieces, pieces.num_tokens, int(len(pieces) > 0), 0))

    @property
    def _is_exact(self) -> BoolArray:
        return np.asarray(self.matches.pieces.destination < self.exact_until, np.bool_)


class PlanMaker:
    """One per engine.

    Args:
        stages_run: whether pipeline stages run a program; None: one worker has all layers.
    """

    def __init__(self, stages_run: Callable[[Program], bool] | None = None) -> None:
        self._stages_run = stages_run
        self._restorations = itertools.count(1)

    def make(
        self, tracked: TrackedRequest, found: FoundPieces, begin: int, stop: int
    ) -> ReusePlan | None:
        """The plan of a request; None, with the reason noted: there is none by its policy."""
        start, matches, tokens = found.exact_until, found.others, tracked.prompt.tokens
        pieces, images, restoration = matches.pieces, tracked.prompt.images, None
        if start > begin:
            ids = tokens[begin:start]
            restoration = Restoration(next(self._restorations), found.restored, ids)
        recipe = Recipe.without_choice(np.zeros(0, np.bool_))
        if len(pieces):
            method = tracked.method_in_force
            stop = method.finder.plan_stop(matches, start, stop)
            later = 0.0 if method.later_turns is None else method.later_turns()
            halo = method.finder.halo
            pieces, wanted = least_work(
                method.make_recipe, method.work, pieces, start, stop, later, halo
            )
            if wanted is None and restoration is not None:
                found = found.alone()
                tracked.decision.num_segments = found.matches.num_segments
                plan = self.make(tracked, found, begin, start)
                assert plan is not None
                plan.left_out = matches.num_tokens
                return plan
            if wanted is None:
                tracked.decision.reason = NOTHING_SAVED
                return None
            if len(pieces) < len(matches.pieces):
                others = matches.num_segments - len(pieces.segments(start).first)
                tracked.decision.num_segments = found.matches.num_segments - others
            recipe = wanted
            if self._stages_run is not None and not self._stages_run(recipe.program):
                tracked.decision.reason = BEHIND_FIRST_STAGE
                return None
            if images is not None:
                of_images = images.covers(start, stop)
                if of_images.any() and recipe.program.dense_layers:
                    tracked.decision.reason = IMAGES_IN_DENSE_LAYERS
                    return None
                recipe = recipe.fixing(of_images)
            recipe = for_similar(recipe, halo, pieces, start, stop)
        else:
            stop = start
        plan = ReusePlan(
            request_id=tracked.request_id,
            start=start,
            stop=stop,
            token_ids=tokens[start:stop],
            pieces=pieces,
            recipe=recipe,
            donor_blocks=found.restored.merged(pieces).donor_blocks,
            donor_depth=matches.max_depth,
            suffix=tokens[stop : stop + 1 if recipe.program.probes_suffix else stop],
            token_at_stop=int(tokens[stop]) if stop < len(tokens) else None,
            max_drift=tracked.method_in_force.max_drift,
            reports=recipe.program.reports or restoration is not None or tracked.is_required,
            lora_id=tracked.tags.lora_id,
            trace_headers=tracked.tags.trace_headers,
            explains=tracked.tags.explains,
            restoration=restoration,
            left_out=matches.num_tokens - pieces.num_tokens,
            mrope_positions=None if images is None else images.mrope_positions(start, stop + 1),
        )
        return plan if tracked.is_required or not len(pieces) else plan.leaving_suffix()


_ONE_SEGMENT = Segments.elsewhere(np.zeros(1, np.int32), np.full(1, np.iinfo(np.int32).max))
"""All of a prompt, read behind other text."""


def least_work(
    make_recipe: Callable[[BoolArray, Segments], Recipe | None],
    work: Callable[[Recipe], int] | None,
    pieces: Pieces,
    start: int,
    stop: int,
    later_turns: float = 0.0,
    halo: Halo = NO_HALO,
) -> tuple[Pieces, Recipe | None]:
    """Those pieces whose reuse is least work, all of them or those in their own context only; and
    the policy's recipe, or None: reusing all of them saves nothing.

    Then none is reused, although those in their own context would save something: blocks of a
    prompt that is computed in full have exact names, which later turns find as their prefix. Where
    the pool was a little larger than one history, reuse all the same took up to a fifth more work.

    Args:
        make_recipe, work: see `Method`.
        pieces: what was found.
        start, stop: of the plan.
        later_turns: that would find the prompt if it were computed in full; else they find all of
            it again as text that was computed elsewhere.
        halo: of similar segments, which is computed beside what the policy wants.
    """
    recipe = make_recipe(pieces.reused(start, stop), pieces.segments(start))
    if work is None or recipe is None:
        return pieces, recipe

    def of(recipe: Recipe, pieces: Pieces) -> int:
        return work(for_similar(recipe, halo, pieces, start, stop))

    all_tokens = np.ones(stop - start, np.bool_)
    everything, least = work(Recipe.without_choice(all_tokens)), of(recipe, pieces)
    lost = 0.0
    if later_turns:
        again = make_recipe(all_tokens, _ONE_SEGMENT)
        lost = later_turns * (everything if again is None else work(again))
    if (lost or least > work(recipe)) and least + lost >= everything:
        return pieces, None
    if not pieces.in_context.any() or pieces.in_context.all():
        return pieces, recipe
    kept = pieces.where(pieces.in_context)
    without = make_recipe(kept.reused(start, stop), kept.segments(start))
    if without is None or least < of(without, kept):
        return pieces, recipe
    return kept, without
