# SPDX-License-Identifier: Apache-2.0
"""`epic`: recompute the first tokens of every segment (EPIC's LegoLink, arXiv 2410.15332).

A segment that was computed elsewhere took its own first tokens for the beginning of the text, and
attends to them as to a sink; computed again, they lose that role. The choice needs no score.

EPIC takes the same small number of tokens of every segment. Here it is `recompute_ratio` of the
segment's tokens, so that methods can be compared at equal work. Overflow and dense layers are not
part of the method, and these options have no effect.
"""

from __future__ import annotations

from vllm_segreuse.plan import Recipe
from vllm_segreuse.policies.base import Situation

CHOOSES = False


def recipe(situation: Situation) -> Recipe:
    """New tokens, and the beginning of each segment."""
    always = ~situation.reused
    ratio, spared = situation.ratio(), situation.spared
    for first, length in zip(situation.segments.first, situation.lengths, strict=True):
        if not spared[first]:
            always[first : first + round(ratio * int(length))] = True
    return Recipe.without_choice(always)
