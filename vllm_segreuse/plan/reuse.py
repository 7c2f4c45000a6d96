# SPDX-License-Identifier: Apache-2.0
"""Plans: where the reused KV of one request comes from, and which of its tokens are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray, count
from vllm_segreuse.plan.check import Check
from vllm_segreuse.plan.outcome import PlanOutcome
from vllm_segreuse.plan.pieces import Pieces
from vllm_segreuse.plan.programs import ModelLayers
from vllm_segreuse.plan.recipe import Fate, Recipe


@dataclass(frozen=True, eq=False)
class Restoration:
    """Whole blocks of a request's own exact prefix that a plan copies as they are, in front of its
    `start`.

    Attributes:
        number: of this engine's restorations; the workers report it (`PlanOutcome`).
        pieces: a block each, one behind the other, from where vLLM's prefix hit ends up to the
            plan's start. None is moved: destination and position are equal.
        token_ids: int32, of these blocks.
    """

    number: int
    pieces: Pieces
    token_ids: IntArray

    @property
    def num_tokens(self) -> int:
        """Tokens that are restored."""
        return len(self.token_ids)


TO_THE_END = np.iinfo(np.int32).max
"""More tokens than any request has."""


@dataclass
class ReusePlan:
    """The work of one request: positions `[begin, stop)` are supplied by the connector.

    prefix hit | restored | reused and computed | token at stop
               begin      start                 stop

    Attributes:
        start: the pass begins here; what is in front of it is exact.
        stop: the pass ends here.
        restoration: what is copied in front of `start`; None: `start` is where the prefix hit ends.
        is_restored: whether it is in place, by what the workers have reported; None: they have not.
            The scheduler's side names no block exactly before.
        token_ids: int32 `[stop - start]`.
        pieces: what is copied, from where.
        recipe: what is computed.
        left_out: tokens that were found, and that it is less work to compute.
        donor_blocks: distinct blocks of vLLM's pool that the pieces read.
        donor_depth: largest provenance depth among them (`Matches.max_depth`).
        block_ids: int32, the request's block table; known once vLLM has allocated it.
        next_token: the token at `stop`, where it is probed; else None. vLLM computes it after the
            pass, but no query says more about what the answer will need. Whoever computes such a
            plan writes the KV of that token, too: what a spoilt pass left there would spoil the
            next one.
        token_at_stop: the token at `stop`, whoever computes it; None: not known. Drafts are given
            it with the hidden state of the token before.
        spread: carried out over several steps, while the request is set aside.
        max_drift: above it everything is computed after all, where drift is measured.
        reports: the workers report a `PlanOutcome`. Of other plans they do so only if they have to
            compute them in full.
        lora_id: vLLM's number of the request's LoRA adapter; 0: none.
        trace_headers: W3C trace context that the request came with; None: it is not traced.
        explains: the workers report which tokens they have computed, where they choose them.
        mrope_positions: int32 `[3, num_tokens + 1]`: time, height and width of the tokens,
            up to that at `stop`, by which M-RoPE rotates; None: a prompt of text, whose
            tokens have their index in all three.
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
    token_at_stop: int | None = None
    spread: bool = False
    max_drift: float = math.inf
    reports: bool = False
    lora_id: int = 0
    trace_headers: Mapping[str, str] | None = None
    explains: bool = False
    restoration: Restoration | None = None
    is_restored: bool | None = None
    left_out: int = 0
    mrope_positions: IntArray | None = None

    @property
    def begin(self) -> int:
        """End of vLLM's own prefix hit."""
        return self.start - self.num_restored

    @property
    def num_restored(self) -> int:
        """Tokens in front of `start` that are copied as they are."""
        return 0 if self.restoration is None else self.restoration.num_tokens

    def restores(self, number: int) -> bool:
        """Whether this is the plan of a restoration."""
        return self.restoration is not None and self.restoration.number == number

    @property
    def exact_until(self) -> int:
        """Up to here all of the request's KV is exact, if what is restored is in place: to the end
        if nothing is behind it that was reused. Known not to be in place, it was computed by the
        pass, and rounded otherwise than vLLM does."""
        if self.restoration is not None and self.is_restored is False:
            return self.begin
        return self.start if self.num_tokens else TO_THE_END

    @property
    def known_exact_until(self) -> int:
        """The same by what the workers have reported so far."""
        waits = self.restoration is not None and self.is_restored is None
        return self.begin if waits else self.exact_until

    @property
    def copied(self) -> Pieces:
        """All that is copied: restored, or reused."""
        restored = self.restoration
        return self.pieces if restored is None else restored.pieces.merged(self.pieces)

    @property
    def num_supplied(self) -> int:
        """Tokens the connector supplies; of a spread plan, all whose slots it writes."""
        return self.num_restored + (self.num_written if self.spread else self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return self.stop - self.start

    @property
    def num_written(self) -> int:
        """Tokens whose slots the pass writes."""
        return self.num_tokens + self._behind

    @property
    def _behind(self) -> int:
        return int(self.next_token is not None)

    def named_early(self, block_size: int) -> int | None:
        """Index of the block that vLLM names before it has computed its last token; None: none.

        Of a spread plan that probes the token behind it. vLLM names what is full when the plan is
        done, and computes that token in a later step. Where it does not end a block, its block is
        full, and named, only after that.
        """
        named_until = self.stop + self._behind
        is_early = self.spread and self._behind and named_until % block_size == 0
        return named_until // block_size - 1 if is_early else None

    @property
    def reused(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose KV is copied."""
        return self.pieces.reused(self.start, self.stop)

    @property
    def check(self) -> Check | None:
        """The test of its similar segments; None: all are accepted, or computed."""
        return self.recipe.program.check

    @property
    def moved(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose copies are read, if they are reused."""
        moved = self.recipe.fates < Fate.ALWAYS
        return moved if self.check is None else moved | self.check.halos(len(moved))

    @property
    def num_tested(self) -> int:
        """Similar segments that may be rejected."""
        return 0 if self.check is None else len(self.check.first)

    @property
    def num_reused(self) -> int:
        """Tokens whose KV is copied."""
        return self.pieces.num_tokens

    @property
    def num_fixed(self) -> int:
        """Reused tokens that are never computed."""
        return count(self.recipe.fixed)

    @property
    def num_entering(self) -> int:
        """Reused tokens that are moved at some layers, and computed above."""
        return count(self.recipe.entering)

    @property
    def num_segments_to_choose_of(self) -> int:
        """Runs of reused tokens, each computed in one sequence, of which any may be chosen."""
        first = self.pieces.segments(self.start).first
        if not len(first):
            return 0
        return int(np.logical_or.reduceat(self.recipe.candidates, first).sum())

    @property
    def num_recomputed(self) -> int:
        """Reused tokens that are computed again, at every layer behind the dense ones; the most of
        them, where the workers decide."""
        return self.recomputed(self.recipe.top_k)

    @property
    def recomputed_positions(self) -> IntArray | None:
        """Positions of the reused tokens that are computed again; None where the workers choose."""
        if self.check is not None or self.recipe.leaves_a_choice:
            return None
        return np.asarray(np.flatnonzero(self.recipe.settled & self.reused) + self.start, np.int32)

    def recomputed(self, chosen: int) -> int:
        """The same, where so many were chosen by their score."""
        return self.recipe.counts(chosen).always - (self.num_tokens - self.num_reused) + chosen

    def recomputed_after(self, outcome: PlanOutcome | None) -> int:
        """The same, as the workers have reported it; None: they report nothing of this plan."""
        if outcome is None:
            return self.num_recomputed
        if outcome.in_full:
            return self.num_reused - self.num_fixed
        added = 0 if outcome.acceptance is None else outcome.acceptance.added
        return self.recomputed(self.num_chosen(outcome.computed)) + added

    def num_chosen(self, computed: int) -> int:
        """Tokens that were chosen by their score, if so many were computed behind the dense
        layers."""
        return computed - self.recipe.counts(0, self._behind).always

    def in_full(self) -> ReusePlan:
        """The same tokens, all that may be computed at every layer, by the pass's own layers. What
        is restored stays as it is."""
        return self.computing(np.ones(self.num_tokens, dtype=np.bool_))

    def without_copies(self) -> ReusePlan:
        """The same tokens, all computed at every layer by the pass's own layers, also those that
        were to be restored: no copy can be relied on. That is reported."""
        if self.restoration is None:
            return replace(self.in_full(), reports=True)
        tokens = np.concatenate((self.restoration.token_ids, self.token_ids))
        nothing = self.restoration.pieces
        nothing = nothing.where(np.zeros(len(nothing), np.bool_))
        given_up = replace(
            self.restoration, pieces=nothing, token_ids=self.restoration.token_ids[:0]
        )
        whole = replace(
            self, start=self.begin, token_ids=tokens, restoration=given_up, reports=True
        )
        return whole.in_full()

    def computing(self, tokens: BoolArray) -> ReusePlan:
        """The same plan; of its tokens these are computed at every layer, by the pass's own
        layers, and what the others hold is left as it is.

        Args:
            tokens: bool `[stop - start]`.
        """
        recipe = Recipe.without_choice(tokens).fixing(self.recipe.fixed)
        return replace(self, recipe=recipe)

    def computed_by(self, recipe: Recipe) -> ReusePlan:
        """The same reuse, with another recipe."""
        return replace(
            self,
            recipe=recipe,
            next_token=self.token_at_stop if recipe.program.probes_next_token else None,
            reports=recipe.program.reports,
        )

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
        self,
        layers: ModelLayers,
        num_tokens: int,
        outcome: PlanOutcome | None = None,
        prefix: int | None = None,
    ) -> float:
        """The work as a share of that of full prefill behind the prefix hit.

        Args:
            layers: of the model.
            num_tokens: of the request; those behind the plan are computed by vLLM.
            outcome: of the plan; None: the most that it computes, if every similar segment is
                accepted.
            prefix: where the prefix hit ends; None: where this plan begins.
        """
        begin = self.begin if prefix is None else prefix
        by_vllm = (num_tokens - self.stop) * layers.count  # the last token, as a rule
        chosen = None if outcome is None else self.num_chosen(outcome.computed)
        computed = self.layer_tokens(layers, chosen) + by_vllm
        if outcome is not None and outcome.in_full:  # once more, and all of it
            computed += self.in_full().layer_tokens(layers)
        if outcome is not None and outcome.acceptance is not None:
            computed += outcome.acceptance.again * layers.count
        return round(computed / ((num_tokens - begin) * layers.count), 4)

    @property
    def active_tokens(self) -> int:
        """Most tokens of `[start, stop)` that any layer of the pass computes."""
        return self.recipe.program.most_active(self.recipe.counts(self.recipe.top_k))
