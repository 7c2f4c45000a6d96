# SPDX-License-Identifier: Apache-2.0
"""Plans: where the reused KV of one request comes from, and which of its tokens are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray
from vllm_segreuse.plan.pieces import Pieces
from vllm_segreuse.plan.programs import Counts, Fixed, ModelLayers, Program


@dataclass(frozen=True)
class Recipe:
    """Which tokens of `[start, stop)` a policy computes, and how.

    Where no token is to be chosen, a program that would choose is replaced by `Fixed`; where all
    are, so is one that computes the others before it chooses.

    Attributes:
        program: how they are computed.
        always: bool `[stop - start]`: computed at every layer. Contains every token not reused.
        probes: bool `[stop - start]`: tokens whose queries give the scores.
        top_k: reused tokens outside `always` that are computed behind the program's dense layers,
            chosen by their score; the most of them, where the program may choose fewer.

    Raises:
        ValueError: tokens are to be chosen by a program that does not choose; or computed before
            the choice, behind tokens that probe.
    """

    program: Program
    always: BoolArray
    probes: BoolArray
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.program.computes_before_choice and self.settled.all():
            object.__setattr__(self, "always", self.settled)
            object.__setattr__(self, "top_k", 0)
        if self.program.chooses and not self.top_k:
            object.__setattr__(self, "program", Fixed(self.program.dense_layers))
        elif self.top_k and not self.program.chooses:
            raise ValueError(f"{self.program} does not choose tokens; top_k is {self.top_k}")
        if self.program.computes_before_choice:
            first = int(self.probes.argmax()) if self.probes.any() else len(self.probes)
            if (self.always & ~self.probes)[first:].any():
                raise ValueError(f"{self.program} computes no tokens once that stand behind probes")

    @classmethod
    def without_choice(cls, always: BoolArray, program: Program | None = None) -> Recipe:
        """These tokens at every layer, and no others.

        Args:
            program: how they are computed; None: by layers of the pass.
        """
        return cls(program or Fixed(), always, probes=np.zeros_like(always))

    @property
    def leaves_a_choice(self) -> bool:
        """Whether only the workers know which tokens are computed at every layer."""
        chooses_all = int(self.always.sum()) + self.top_k >= len(self.always)
        return self.top_k > 0 and (self.program.may_choose_fewer or not chooses_all)

    @property
    def settled(self) -> BoolArray:
        """bool `[stop - start]`: tokens computed at every layer, whatever is chosen."""
        chooses_all = self.top_k > 0 and not self.leaves_a_choice
        return np.ones_like(self.always) if chooses_all else self.always

    def counts(self, chosen: int, behind: int = 0) -> Counts:
        """Tokens by what is done with them.

        Args:
            chosen: by their score.
            behind: tokens behind the plan that are computed and probed with it.
        """
        always, probes = int(self.always.sum()), int(self.probes.sum())
        return Counts(len(self.always) + behind, always + behind, chosen, probes + behind)


class PlanOutcome(NamedTuple):
    """What the workers report of a plan.

    Attributes:
        computed: tokens that were computed at all layers behind the dense ones.
        drift: see `prefill/drift.py`; None: not measured.
        in_full: everything was computed after that, because the drift was above `max_drift`.
        positions: of the tokens that were computed, ascending; None: the plan does not explain.
    """

    computed: int
    drift: float | None = None
    in_full: bool = False
    positions: tuple[int, ...] | None = None


@dataclass
class ReusePlan:
    """The work of one request: positions `[start, stop)` are supplied by the connector.

    Attributes:
        token_ids: int32 `[stop - start]`.
        pieces: what is copied, from where.
        recipe: what is computed.
        donor_blocks: distinct physical blocks the pieces read.
        donor_depth: largest provenance depth among them.
        block_ids: int32, the request's block table; known once vLLM has allocated it.
        next_token: the token at `stop`, where it is probed; else None. vLLM computes it after the
            pass, but no query says more about what the answer will need. Whoever computes such a
            plan writes the KV of that token, too: what a spoilt pass left there would spoil the
            next one.
        spread: carried out over several steps, while the request is set aside.
        max_drift: above it everything is computed after all, where drift is measured.
        reports: the workers report a `PlanOutcome`, also if they have to compute the plan in full.
        lora_id: vLLM's number of the request's LoRA adapter; 0: none.
        trace_headers: W3C trace context that the request came with; None: it is not traced.
        explains: the workers report which tokens they have computed, where they choose them.
    """

    request_id: str
    start: int
    stop: int
    token_ids: IntArray
    pieces: Pieces
    recipe: Recipe
    donor_blocks: list[int]
    donor_depth: int
    block_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    next_token: int | None = None
    spread: bool = False
    max_drift: float = math.inf
    reports: bool = False
    lora_id: int = 0
    trace_headers: Mapping[str, str] | None = None
    explains: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens the connector supplies."""
        return self.stop - self.start

    @property
    def num_written(self) -> int:
        """Tokens whose slots the pass writes."""
        return self.num_tokens + self._behind

    @property
    def _behind(self) -> int:
        return int(self.next_token is not None)

    @property
    def reused(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose KV is copied."""
        return self.pieces.reused(self.start, self.stop)

    @property
    def num_reused(self) -> int:
        """Tokens whose KV is copied."""
        return self.pieces.num_tokens

    @property
    def num_segments(self) -> int:
        """Runs of reused tokens, each computed in one sequence."""
        return len(self.pieces.segments(self.start).first)

    @property
    def num_recomputed(self) -> int:
        """Reused tokens that are computed again, at every layer behind the dense ones; the most of
        them, where the workers decide."""
        return self.recomputed(self.recipe.top_k)

    @property
    def recomputed_positions(self) -> IntArray | None:
        """Positions of the reused tokens that are computed again; None where the workers choose."""
        if self.recipe.leaves_a_choice:
            return None
        return np.asarray(np.flatnonzero(self.recipe.settled & self.reused) + self.start, np.int32)

    def recomputed(self, chosen: int) -> int:
        """The same, where so many were chosen by their score."""
        return int(self.recipe.always.sum()) - (self.num_tokens - self.num_reused) + chosen

    def recomputed_after(self, outcome: PlanOutcome | None) -> int:
        """The same, as the workers have reported it; None: they report nothing of this plan."""
        if outcome is None:
            return self.num_recomputed
        if outcome.in_full:
            return self.num_reused
        return self.recomputed(self.num_chosen(outcome.computed))

    def num_chosen(self, computed: int) -> int:
        """Tokens that were chosen by their score, if so many were computed behind the dense
        layers."""
        return computed - self.recipe.counts(0, self._behind).always

    def in_full(self) -> ReusePlan:
        """The same tokens, all of them computed at every layer, by the pass's own layers."""
        all_tokens = np.ones(self.num_tokens, dtype=np.bool_)
        return replace(self, recipe=Recipe.without_choice(all_tokens))

    def computed_by(self, recipe: Recipe, token_at_stop: int) -> ReusePlan:
        """The same reuse, with another recipe.

        Args:
            token_at_stop: becomes `next_token`, where that is probed.
        """
        program = recipe.program
        probed = token_at_stop if program.probes_next_token else None
        return replace(self, recipe=recipe, next_token=probed, reports=program.reports)

    def layer_tokens(self, layers: ModelLayers, chosen: int | None = None) -> int:
        """Tokens computed, summed over the layers: the work of the pass.

        Args:
            layers: of the model.
            chosen: tokens chosen by their score; None: as many as the recipe allows.
        """
        recipe = self.recipe
        chosen = recipe.top_k if chosen is None else chosen
        return recipe.program.cost(recipe.counts(chosen, self._behind), layers)

    def computed_share(
        self, layers: ModelLayers, num_tokens: int, chosen: int | None = None, in_full: bool = False
    ) -> float:
        """The work as a share of that of full prefill behind the prefix hit.

        Args:
            layers: of the model.
            num_tokens: of the request; those behind the plan are computed by vLLM.
            chosen: see `layer_tokens`.
            in_full: everything was computed once more.
        """
        by_vllm = (num_tokens - self.stop) * layers.count  # the last token, as a rule
        computed = self.layer_tokens(layers, chosen) + by_vllm
        if in_full:  # once more, and all of it
            computed += self.in_full().layer_tokens(layers)
        return round(computed / ((num_tokens - self.start) * layers.count), 4)

    @property
    def active_tokens(self) -> int:
        """Most tokens of `[start, stop)` that any layer of the pass computes."""
        return self.recipe.program.most_active(self.recipe.counts(self.recipe.top_k))
