# SPDX-License-Identifier: Apache-2.0
"""Recipes: what is done with each token of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, Fates, count
from vllm_segreuse.plan.programs import Counts, Fixed, Program


class Fate:
    """What becomes of a token, in the order of how much of it is computed. Tokens that are not
    reused are `ALWAYS` or `PROBE`.

    Plain integers: numpy compares int8 with a member of an `IntEnum` as int64, which takes thirty
    times as long.

    Attributes:
        FIXED: reused and never computed, not in full either: a token of an image.
        MOVED: reused; no score chooses it.
        CANDIDATE: reused, and computed behind the dense layers if its score is high enough.
        ENTERS: reused; moved at the layers below the first of the program's cuts, and computed from
            there on. `ENTERS + i`: likewise at cut `i`.
        ALWAYS: computed at every layer.
        PROBE: computed at every layer; the attention that it pays gives the scores.
    """

    FIXED: Final = 0
    MOVED: Final = 1
    CANDIDATE: Final = 2
    ENTERS: Final = 3
    ALWAYS: Final = 126
    PROBE: Final = 127


MOST_CUTS = Fate.ALWAYS - Fate.ENTERS
"""Layers at which tokens of one plan can enter."""


def fates_of(
    always: BoolArray, probes: BoolArray | None = None, spared: BoolArray | None = None
) -> Fates:
    """Fates of tokens of which some are chosen by their score.

    Args:
        always: bool `[tokens]`: computed at every layer. Contains every token not reused.
        probes: bool `[tokens]`, those of them that probe; None: none does.
        spared: bool `[tokens]`: reused tokens that are no candidates, unless they are always
            computed; None: all are candidates.

    Returns:
        int8 `[tokens]`.
    """
    fates = np.full(len(always), Fate.CANDIDATE, np.int8)
    if spared is not None:
        fates[spared] = Fate.MOVED
    fates[always] = Fate.ALWAYS
    if probes is not None:
        fates[probes] = Fate.PROBE
    return fates


@dataclass(frozen=True, eq=False)
class Recipe:
    """Which tokens of `[start, stop)` a policy computes, and how. Made by `of`.

    Attributes:
        program: how they are computed.
        fates: int8 `[stop - start]`, a `Fate` of each.
        top_k: candidates that are computed behind the program's dense layers, chosen by their
            score; the most of them, where the program may choose fewer.
    """

    program: Program
    fates: Fates
    top_k: int = 0

    @classmethod
    def of(cls, program: Program, fates: Fates, top_k: int = 0) -> Recipe:
        """The simplest recipe that computes the same.

        Where no token is to be chosen, `Fixed` takes the place of a program that would choose. So
        it does where all candidates are, if the program computes other tokens before it chooses.

        Args:
            program: how tokens are computed.
            fates: int8 `[tokens]` (`fates_of`).
            top_k: candidates to choose; no more are chosen than there are.

        Raises:
            ValueError: tokens are to be chosen by a program that does not choose; or tokens that do
                not probe stand behind probes, where the program computes the others first.
        """
        if top_k and not program.chooses:
            raise ValueError(f"{program} does not choose tokens; top_k is {top_k}")
        is_candidate = fates == Fate.CANDIDATE
        candidates = count(is_candidate)
        top_k = min(top_k, candidates)
        if top_k == candidates and program.computes_before_choice and not program.may_choose_fewer:
            fates, top_k = _where(is_candidate, Fate.ALWAYS, fates), 0
        elif candidates and not top_k:
            fates = _where(is_candidate, Fate.MOVED, fates)
        if program.chooses and not top_k:
            program = Fixed(program.dense_layers, check=program.check)
        if program.computes_before_choice and (_from_first_probe(fates) == Fate.ALWAYS).any():
            raise ValueError(f"{program} computes no tokens once that stand behind probes")
        return cls(program, fates, top_k)

    @classmethod
    def without_choice(cls, always: BoolArray, program: Program | None = None) -> Recipe:
        """These tokens at every layer, and no others.

        Args:
            always: bool `[tokens]`. Contains every token not reused.
            program: how they are computed; None: by layers of the pass.
        """
        moved = np.full(len(always), Fate.MOVED, np.int8)
        return cls.of(program or Fixed(), _where(always, Fate.ALWAYS, moved))

    @property
    def always(self) -> BoolArray:
        """bool `[stop - start]`: tokens computed at every layer, whatever their score."""
        return self.fates >= Fate.ALWAYS

    @property
    def probes(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose queries give the scores."""
        return self.fates == Fate.PROBE

    @property
    def candidates(self) -> BoolArray:
        """bool `[stop - start]`: tokens that may be chosen."""
        return self.fates == Fate.CANDIDATE

    @property
    def fixed(self) -> BoolArray:
        """bool `[stop - start]`: tokens that are never computed."""
        return self.fates == Fate.FIXED

    @property
    def entering(self) -> BoolArray:
        """bool `[stop - start]`: tokens that are computed from a cut on."""
        return (self.fates >= Fate.ENTERS) & (self.fates < Fate.ALWAYS)

    @property
    def leaves_a_choice(self) -> bool:
        """Whether only the workers know which tokens are computed at every layer."""
        if not self.top_k or self.program.may_choose_fewer:
            return self.top_k > 0
        return self.top_k < count(self.candidates)

    @property
    def settled(self) -> BoolArray:
        """bool `[stop - start]`: tokens computed at every layer, whatever is chosen."""
        chooses_all = self.top_k > 0 and not self.leaves_a_choice
        return self.always | self.candidates if chooses_all else self.always

    def suffix_tokens(self, new_from: int) -> int:
        """How many tokens at the end can be left to vLLM's forward, which runs in any case: those
        that the pass computes for their own sake, and for a choice at most. What has passed dense
        layers for the choice goes on from there instead: it would pass them once more.

        Args:
            new_from: from here on no token is reused.
        """
        count = len(self.fates)
        if self.program.probes_suffix and not self.program.dense_layers:
            others = np.flatnonzero(self.fates != Fate.PROBE)
            return count - max(new_from, int(others[-1]) + 1 if len(others) else 0)
        chooses_nothing = self.program == Fixed() and self.program.check is None
        return count - new_from if chooses_nothing else 0

    def up_to(self, stop: int) -> Recipe:
        """The same of the first `stop` tokens."""
        return Recipe(self.program, self.fates[:stop], self.top_k)

    def also(self, tokens: BoolArray) -> Recipe:
        """The same, with other tokens computed at every layer, too; no fixed ones.

        Where those that do not probe are computed before the choice, the ones behind probes probe.

        Args:
            tokens: bool `[stop - start]`.
        """
        added = tokens & (self.fates < Fate.ALWAYS) & (self.fates != Fate.FIXED)
        fates = _where(added, Fate.ALWAYS, self.fates)
        if self.program.computes_before_choice:
            behind = _from_first_probe(fates)
            behind[behind == Fate.ALWAYS] = Fate.PROBE
        return Recipe.of(self.program, fates, self.top_k)

    def fixing(self, tokens: BoolArray) -> Recipe:
        """The same without some tokens, of which none is computed; of the others the same share
        is chosen.

        Args:
            tokens: bool `[stop - start]`: reused ones.

        Raises:
            ValueError: every token passes some of the layers.
        """
        if not tokens.any():
            return self
        if self.program.dense_layers:
            raise ValueError(f"{self.program} computes every token, and those of images cannot be")
        fates = _where(tokens, Fate.FIXED, self.fates)
        before, left = (count(of == Fate.CANDIDATE) for of in (self.fates, fates))
        return Recipe.of(self.program, fates, round(self.top_k * left / max(1, before)))

    def counts(self, chosen: int, suffix: int = 0) -> Counts:
        """Tokens by what is done with them.

        Args:
            chosen: by their score.
            suffix: tokens behind the plan that probe, too.
        """
        entering = tuple(
            count(self.fates == Fate.ENTERS + cut) for cut in range(len(self.program.cuts))
        )
        return Counts(
            tokens=len(self.fates),
            always=count(self.always),
            chosen=chosen,
            probes=count(self.probes),
            entering=entering,
            suffix=suffix,
        )


def _from_first_probe(fates: Fates) -> Fates:
    """A view of the fates from the first probe on; of none where nothing probes."""
    is_probe = fates == Fate.PROBE
    return fates[int(is_probe.argmax()) :] if is_probe.any() else fates[:0]


def _where(mask: BoolArray, fate: int, others: Fates) -> Fates:
    """One fate where the mask is true, that of the others elsewhere."""
    fates = others.copy()  # `np.where` takes twice as long
    fates[mask] = fate
    return fates
