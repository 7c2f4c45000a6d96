# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers about one request: where its reused KV comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray
from vllm_segreuse.plan.pieces import reused_mask


class Score(Enum):
    """What the `top_k` tokens of a recipe are chosen by."""

    ATTENTION = "the attention that the probes pay them at the boundary layer"
    DEVIATION = "how far keys and values at the boundary layer are from the reused ones"
    ALL_LAYERS = "the attention that the probes pay them, summed over the layers"
    PEAK = "the largest share of its attention that any probe pays them, at any head and layer"

    @property
    def asks_all_layers(self) -> bool:
        """Whether the probes run through all layers before the choice."""
        return self in (Score.ALL_LAYERS, Score.PEAK)


@dataclass(frozen=True)
class Recipe:
    """Which tokens of `[start, stop)` a policy computes, and at which layers.

    Attributes:
        always: bool `[stop - start]`: computed at every layer. Contains every token not reused.
        dense_layers: leading layers at which every token is computed (SparseX's l*).
        top_k: reused tokens outside `always` that are recomputed from layer `dense_layers` on,
            chosen by their score once the scores are known; with `least_share` the most of them.
        probes: bool `[stop - start]`: tokens whose queries give the scores.
        score: what the choice goes by.
        least_share: of the `top_k` tokens only those are chosen whose score is at least this; 0:
            all of them. How many that are only the workers know.
        stock: the model's own forward computes what is computed, as it does for vLLM; nothing is
            dense or chosen.
    """

    always: BoolArray
    dense_layers: int
    top_k: int
    probes: BoolArray
    score: Score = Score.ATTENTION
    least_share: float = 0.0
    stock: bool = False

    @classmethod
    def without_choice(cls, always: BoolArray, stock: bool = False) -> Recipe:
        """These tokens at every layer, and no others."""
        return cls(always, dense_layers=0, top_k=0, probes=np.zeros_like(always), stock=stock)

    @property
    def asks_next_token(self) -> bool:
        """Whether the query of the token behind the plan should take part in the choice."""
        return self.top_k > 0 and self.score is not Score.DEVIATION


@dataclass
class ReusePlan:
    """The work of one request: positions `[start, stop)` are supplied by the connector.

    Attributes:
        token_ids: int32 `[stop - start]`.
        pieces: int32 `[pieces, 5]`: destination position, length, donor block, offset in the donor
            block, donor position (see `matcher.Matches`).
        recipe: what is computed.
        donor_blocks: distinct physical blocks the pieces read.
        donor_depth: largest provenance depth among them.
        block_ids: int32, the request's block table; known once vLLM has allocated it.
        next_token: the token at `stop`, where it takes part in the choice; else None. vLLM computes
            it after the pass, but no query says more about what the answer will need. Whoever
            computes such a plan writes the KV of that token, too: what a spoilt pass left there
            would spoil the next one.
        spread: carried out over several steps, while the request is set aside.
        counted: how many tokens are computed only the workers know (`Recipe.least_share`). They
            tell it, also if they have to compute the plan in full.
    """

    request_id: str
    start: int
    stop: int
    token_ids: IntArray
    pieces: IntArray
    recipe: Recipe
    donor_blocks: list[int]
    donor_depth: int
    block_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    next_token: int | None = None
    spread: bool = False
    counted: bool = False

    @property
    def num_written(self) -> int:
        """Tokens whose slots the pass writes."""
        return self.num_tokens + int(self.next_token is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens the connector supplies."""
        return self.stop - self.start

    @property
    def reused(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose KV is copied."""
        return reused_mask(self.pieces, self.start, self.stop)

    @property
    def num_reused(self) -> int:
        """Tokens whose KV is copied."""
        return int(self.pieces[:, 1].sum())

    @property
    def num_recomputed(self) -> int:
        """Reused tokens that are computed again, at every layer from `dense_layers` on; the most of
        them, where the workers decide."""
        return self.recomputed(self.recipe.top_k)

    def recomputed(self, chosen: int) -> int:
        """The same, where so many were chosen by their score."""
        return int(self.recipe.always.sum()) - (self.num_tokens - self.num_reused) + chosen

    def in_full(self) -> ReusePlan:
        """The same tokens, all of them computed at every layer, by the pass's own layers."""
        all_tokens = np.ones(self.num_tokens, dtype=np.bool_)
        return replace(self, recipe=Recipe.without_choice(all_tokens))

    def layer_tokens(self, num_layers: int, chosen: int | None = None) -> int:
        """Tokens computed, summed over the layers: the work of the pass.

        Who is asked before the pass is computed once more: the probes, at all layers but the last,
        where scores come from all layers; what is always computed, at the first, where they come
        from there.

        Args:
            num_layers: of the model.
            chosen: tokens chosen by their score; None: as many as the recipe allows.
        """
        recipe = self.recipe
        chosen = recipe.top_k if chosen is None else chosen
        asked = int(self.next_token is not None)
        always = int(recipe.always.sum()) + asked
        work = recipe.dense_layers * (self.num_tokens + asked)
        work += (num_layers - recipe.dense_layers) * (always + chosen)
        if recipe.score is Score.ATTENTION and recipe.top_k and not recipe.dense_layers:
            work += always
        if recipe.score.asks_all_layers and recipe.top_k:
            work += (num_layers - 1) * (int(recipe.probes.sum()) + asked)
        return work

    @property
    def active_tokens(self) -> int:
        """Most tokens any layer of the pass computes."""
        if self.recipe.dense_layers:
            return self.num_tokens
        return int(self.recipe.always.sum()) + self.recipe.top_k
