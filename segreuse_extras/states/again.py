# SPDX-License-Identifier: Apache-2.0
"""`focus` where states are composed: segments that the question looks up are read again, each as a
whole.

    moved       h A A A B B B h C C C q q      A, B, C are composed, h is computed, q is read once
    B chosen    . . . . B B B h . . . . .      from the state behind A on; C is composed once more
    vLLM        . . . . . . . . . . . q q

A part of a segment has no map, so nothing less than a segment is read again, and all that is new
behind the first of them with it: its state has changed. The study in `lab/hybrids` chooses so, and
with two of eight documents, a quarter of what was reused, it kept .97 of full prefill's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_segreuse.plan import Counts, ModelLayers, Program, Recipe, fates_of
from vllm_segreuse.policies import Situation

POLICIES = "focus", "shift"
"""What a request of such a model may ask for: to read again what its question looks up, or
nothing."""

SHARE = 0.25
"""Of the tokens that may be read again: so many are, as a rule."""

MOST = 0.5
"""Of all reused tokens: a single segment up to this share is read although it is above `SHARE`. Of
two or three documents one is; where a longer one is most of the prompt, its question has little
else to look up, and to read it would be full prefill."""


@dataclass(frozen=True)
class ReadAgain(Program):
    """By the attention that the probes pay at all layers of attention. New text that is behind the
    first chosen segment is computed twice; how much that is, only the workers know.

    Attributes:
        budget: tokens of chosen segments. The first one alone may have up to the recipe's `top_k`.
    """

    budget: int
    probes_suffix = True
    computes_before_choice = True

    @property
    def may_choose_fewer(self) -> bool:
        """Segments are chosen as long as they fit."""
        return True

    def layers_before_choice(self, layers: ModelLayers) -> int:
        """All: states that are chosen by are those behind the last layer."""
        return layers.count

    def most_active(self, counts: Counts) -> int:
        """What is computed twice counts twice."""
        return 2 * counts.always + counts.chosen + counts.suffix

    def cost(self, counts: Counts, layers: ModelLayers) -> int:
        """Without what is computed twice (`PlanOutcome.again`)."""
        return layers.count * (counts.always + counts.chosen + counts.suffix)


def recipe(situation: Situation, segments: Sequence[tuple[int, int]]) -> Recipe | None:
    """What is computed of a plan; None: as much as if nothing were reused.

    A share that was asked for is taken as it is, as by other policies.

    Args:
        situation: of the request.
        segments: first token of each segment that is reused as a whole, and the one behind its
            last; ascending.
    """
    reused, spared = situation.reused, situation.spared
    open_segments = [(first, stop) for first, stop in segments if not spared[first:stop].all()]
    lengths = [stop - first for first, stop in open_segments]
    candidates = np.zeros_like(reused)
    for first, stop in open_segments:
        candidates[first:stop] = True
    budget, most = _budget(situation, lengths)
    if most >= sum(lengths):  # without a choice there is no need to ask
        return Recipe.without_choice(~reused | candidates)
    if most < min(lengths):
        return Recipe.without_choice(~reused)
    end = segments[-1][1]
    if situation.recompute_ratio is None:
        twice = int((~reused[open_segments[0][0] : end]).sum())
        if twice + most + len(reused) - end >= int(reused.sum()):
            return None
    fates = fates_of(~reused, np.arange(len(reused)) >= end, reused & ~candidates)
    return Recipe.of(ReadAgain(budget), fates, most)


def _budget(situation: Situation, lengths: Sequence[int]) -> tuple[int, int]:
    """Most tokens of all segments that are read again, and of the first of them alone."""
    in_all = sum(lengths)
    if situation.recompute_ratio is not None:
        budget = round(situation.recompute_ratio * in_all)
        return budget, budget
    budget, half = round(SHARE * in_all), MOST * int(situation.reused.sum())
    return budget, max(budget, max((it for it in lengths if it <= half), default=0))


def chosen(paid: Sequence[float], lengths: Sequence[int], budget: int, most: int) -> list[int]:
    """Which segments are read again, ascending: the best ones that fit.

    Args:
        paid: attention to each.
        lengths: tokens of each.
        budget: tokens of all that are chosen.
        most: tokens that the first one may have, if more.
    """
    found = list[int]()
    room = most
    for number in sorted(range(len(paid)), key=lambda it: -paid[it]):  # stable
        if lengths[number] <= room:
            found.append(number)
            room = budget - sum(lengths[it] for it in found)
    return sorted(found)
