# SPDX-License-Identifier: Apache-2.0
"""What similar segments change of a recipe: their halos are computed, and compared; and some of
their tokens enter between layers, from boundary states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray
from vllm_segreuse.plan.check import Check, Halo
from vllm_segreuse.plan.pieces import Pieces
from vllm_segreuse.plan.programs import Fixed, Staged
from vllm_segreuse.plan.recipe import MOST_CUTS, Fate, Recipe
from vllm_segreuse.plan.reuse import ReusePlan


def for_similar(recipe: Recipe, halo: Halo, pieces: Pieces, start: int, stop: int) -> Recipe:
    """A policy's recipe with what the server asks of similar segments.

    Args:
        recipe: of the policy.
        halo: that the server asks for.
        pieces: that are copied.
        start, stop: of the plan.

    Raises:
        ValueError: tokens enter between layers, and the policy chooses tokens or has dense layers.
    """
    return staged(with_halos(recipe, halo, pieces, start), pieces.enters(start, stop))


def with_halos(recipe: Recipe, halo: Halo, pieces: Pieces, start: int) -> Recipe:
    """The same, with the halos of similar segments computed, too. Its program checks the segments,
    where the server has a bound and anything is left to be computed.

    Args:
        recipe: of the policy.
        halo: that the server asks for.
        pieces: that are copied.
        start: of the plan.
    """
    check = check_of(halo, pieces, start)
    if check is None:
        return recipe
    recipe = recipe.also(check.halos(len(recipe.fates)))
    if halo.max_drift is None or recipe.settled.all():
        return recipe
    return replace(recipe, program=replace(recipe.program, check=check))


def check_of(halo: Halo, pieces: Pieces, start: int) -> Check | None:
    """The test of what a plan copies from similar text; None: there is no such text, or no halo.

    Without a bound every segment passes.
    """
    if not halo.tokens or not pieces.is_similar.any():
        return None
    first, stop = pieces.similar_segments(start)
    max_drift = math.inf if halo.max_drift is None else halo.max_drift
    return Check(first, stop, halo.tokens, max_drift)


def staged(recipe: Recipe, enters: IntArray | None) -> Recipe:
    """The same, where tokens enter from boundary states unless they are always computed, or never.

    Args:
        recipe: without a choice.
        enters: int32 `[tokens]`: the layer from which on each token is computed, -1 where it is
            moved at all layers; None: all are.

    Raises:
        ValueError: the program stops between layers itself, or chooses tokens; or tokens enter at
            more than `MOST_CUTS` layers.
    """
    if enters is None:
        return recipe
    is_entering = (enters >= 0) & ~recipe.always & ~recipe.fixed
    cuts, cut = np.unique(enters[is_entering], return_inverse=True)
    if not len(cuts):
        return recipe
    if recipe.program != Fixed():
        raise ValueError(f"{recipe.program} has no stages at which tokens enter")
    if len(cuts) > MOST_CUTS:
        raise ValueError(f"tokens enter at {len(cuts)} layers, of at most {MOST_CUTS}")
    fates = recipe.fates.copy()
    fates[is_entering] = Fate.ENTERS + cut
    return Recipe.of(Staged(tuple(cuts.tolist()), check=recipe.program.check), fates)


def second_round(plan: ReusePlan, drifts: Sequence[float], computed: BoolArray) -> ReusePlan | None:
    """What is left to be computed once halos were compared: the rest of rejected segments, and
    what was computed behind the first of it, since that attended to what had been moved.

    Args:
        plan: that has a check.
        drifts: of each similar segment.
        computed: bool `[stop - start]`: tokens that were computed so far.

    Returns:
        The plan; None: there is nothing left.
    """
    assert plan.check is not None
    left = plan.check.rejected(drifts, plan.num_tokens) & ~computed
    if not left.any():
        return None
    behind = np.arange(plan.num_tokens) > left.argmax()
    attended = computed | plan.recipe.entering
    return plan.computing(left | (attended & behind))
