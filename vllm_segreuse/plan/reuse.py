# SPDX-License-Identifier: Apache-2.0
"""Plans: where the reused KV of one request comes from, and which of its tokens are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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


class OtherTable(NamedTuple):
    """A block table of a request beside `ReusePlan.block_ids`: of another KV cache group.

    Attributes:
        block_ids: int32, the request's blocks there; 0 where it has none.
        sources: int32 `[pieces]`, the block that each piece is copied from there.
    """

    block_ids: IntArray
    sources: IntArray


TO_THE_END = np.iinfo(np.int32).max
"""More tokens than any request has."""


@dataclass
class ReusePlan:
    """The work of one request: positions `[begin, stop)` are supplied by the connector.

    prefix hit | restored | reused and computed | new text behind, at least one token
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
        others: the same in further KV cache groups, in the order of `KvGroup.others`.
        suffix: int32 `[n]`, the tokens from `stop` on, where they are probed: the end of the
            question, or the prompt's last token alone. The pass reads them to choose, and leaves
            some KV in their slots; vLLM's forward reads them again behind what was chosen, and
            writes theirs.
        token_at_stop: the token at `stop`; None: not known. Drafts are given it with the hidden
            state of the token before.
        spread: carried out over several steps, while the request is set aside.
        max_drift: above it everything is computed after all, where drift is measured.
        reports: the workers report a `PlanOutcome`. Of other plans they do so only if they have to
            compute them in full.
        lora_id: vLLM's number of the request's LoRA adapter; 0: none.
        trace_headers: W3C trace context that the request came with; None: it is not traced.
        explains: the workers report which tokens they have computed, where they choose them.
        mrope_positions: int32 `[3, n]`: time, height and width of the tokens, with the suffix, by
            which M-RoPE rotates; None: a prompt of text, whose tokens have their index in all
            three.
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
    suffix: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
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
    others: tuple[OtherTable, ...] = ()

    def sources_and_table(self, table: int) -> tuple[IntArray, IntArray]:
        """The block that each piece is copied from, and the request's blocks.

        Args:
            table: 0, or 1 + the number of one of the others.
        """
        if not table:
            return self.pieces.block, self.block_ids
        other = self.others[table - 1]
        return other.sources, other.block_ids

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
        """Tokens the connector supplies."""
        return self.num_restored + self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return self.stop - self.start

    @property
    def num_written(self) -> int:
        """Tokens whose slots the pass writes."""
        return self.num_tokens + len(self.suffix)

    @property
    def written_until(self) -> int:
        """Behind the last slot that the pass writes."""
        return self.start + self.num_written

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
        return computed - self.recipe.counts(0).always

    def in_full(self) -> ReusePlan:
        """The same tokens, all that may be computed at every layer, by the pass's own layers. What
        is restored stays as it is."""
        return self.computing(np.ones(self.num_tokens, dtype=np.bool_))

    def without_copies(self) -> ReusePlan:
        """The same tokens, all computed at every layer by the pass's own layers, also those that
        were to be restored: no copy can be relied on. That is reported.

        So is the suffix: what a spoilt pass left in its slots would spoil this one.
        """
        if self.restoration is None:
            return replace(self.in_full(), suffix=self.suffix, reports=True)
        tokens = np.concatenate((self.restoration.token_ids, self.token_ids))
        nothing = self.restoration.pieces
        nothing = nothing.where(np.zeros(len(nothing), np.bool_))
        given_up = replace(
            self.restoration, pieces=nothing, token_ids=self.restoration.token_ids[:0]
        )
        whole = replace(
            self, start=self.begin, token_ids=tokens, restoration=given_up, reports=True
        )
        return replace(whole.in_full(), suffix=self.suffix)

    def computing(self, tokens: BoolArray) -> ReusePlan:
        """The same plan; of its tokens these are computed at every layer, by the pass's own
        layers, and what the others hold is left as it is. Nothing is chosen, so no suffix is read.

        Args:
            tokens: bool `[stop - start]`.
        """
        recipe = Recipe.without_choice(tokens).fixing(self.recipe.fixed)
        return replace(self, recipe=recipe, suffix=self.suffix[:0])

    def computed_by(self, recipe: Recipe, token_ids: IntArray) -> ReusePlan:
        """The same reuse, with another recipe.

        Args:
            recipe: of the tokens from `start` on, also of those that this plan leaves to vLLM.
            token_ids: int32 `[n + 1]`, of these, and the one behind.
        """
        whole = replace(
            self,
            stop=self.start + len(recipe.fates),
            token_ids=token_ids[:-1],
            recipe=recipe,
            suffix=token_ids[-1:] if recipe.program.probes_suffix else token_ids[:0],
            token_at_stop=int(token_ids[-1]),
            reports=recipe.program.reports,
        )
        return whole.leaving_suffix()

    def leaving_suffix(self) -> ReusePlan:
        """The same plan, which ends where vLLM's forward can go on."""
        count = self.num_tokens - self.recipe.suffix_tokens(self.pieces.stop - self.start)
        if count == self.num_tokens:
            return self
        left = self.token_ids[count:]
        return replace(
            self,
            stop=self.start + count,
            token_ids=self.token_ids[:count],
            recipe=self.recipe.up_to(count),
            suffix=np.concatenate([left, self.suffix]) if len(self.suffix) else self.suffix,
            token_at_stop=int(left[0]),
        )

    def layer_tokens(self, layers: ModelLayers, chosen: int | None = None) -> int:
        """Tokens computed, summed over the layers: the work of the pass.

        Args:
            layers: of the model.
            chosen: tokens chosen by their score; None: as many as the recipe allows.
        """
        recipe = self.recipe
        chosen = recipe.top_k if chosen is None else chosen
        return recipe.program.cost(recipe.counts(chosen, len(self.suffix)), layers)

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
        by_vllm = (num_tokens - self.stop) * layers.in_all  # the last token, as a rule
        chosen = None if outcome is None else self.num_chosen(outcome.computed)
        computed = self.layer_tokens(layers, chosen) + by_vllm
        if outcome is not None and outcome.in_full:  # once more, and all of it
            computed += self.in_full().layer_tokens(layers)
        if outcome is not None:
            tested = 0 if outcome.acceptance is None else outcome.acceptance.again
            computed += (outcome.again + tested) * layers.count
        return round(computed / ((num_tokens - begin) * layers.in_all), 4)

    @property
    def active_tokens(self) -> int:
        """Most tokens that any layer of the pass computes."""
        counts = self.recipe.counts(self.recipe.top_k, len(self.suffix))
        return self.recipe.program.most_active(counts)
