# SPDX-License-Identifier: Apache-2.0
"""Plans: where the reused KV of one request comes from, and which of its tokens are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vllm_segreuse.plan.acceptance import Acceptance, Halo, acceptance_of
from vllm_segreuse.plan.arrays import BoolArray, IntArray
from vllm_segreuse.plan.pieces import Pieces
from vllm_segreuse.plan.programs import Counts, Fixed, ModelLayers, Program, Staged


@dataclass(frozen=True)
class Recipe:
    """Which tokens of `[start, stop)` a policy computes, and how.

    Where no token is to be chosen, a program that would choose is replaced by `Fixed`; where all
    that may be are, so is one that computes the others before it chooses.

    Attributes:
        program: how they are computed.
        always: bool `[stop - start]`: computed at every layer. Contains every token not reused.
        probes: bool `[stop - start]`: tokens whose queries give the scores.
        top_k: reused tokens outside `always` that are computed behind the program's dense layers,
            chosen by their score; the most of them, where the program may choose fewer.
        kept: bool `[stop - start]`: reused tokens that are never chosen; None: none of them.
        enters: int32 `[stop - start]`: the layer at which a reused token enters from a boundary
            state, -1 where none does; None: no token does.
        held: bool `[stop - start]`: reused tokens that are never computed, those of images; None:
            there are none.

    Raises:
        ValueError: tokens are to be chosen by a program that does not choose; or computed before
            the choice, behind tokens that probe; or held tokens are to be computed.
    """

    program: Program
    always: BoolArray
    probes: BoolArray
    top_k: int = 0
    kept: BoolArray | None = None
    enters: IntArray | None = None
    held: BoolArray | None = None

    def __post_init__(self) -> None:
        if self.held is not None and (self.held & (self.always | self.probes)).any():
            raise ValueError("tokens of images are held: they are neither computed nor probe")
        chooses_all = self.top_k > 0 and not self.leaves_a_choice
        if self.program.computes_before_choice and (chooses_all or self.settled.all()):
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

    def entering(self, enters: IntArray | None) -> Recipe:
        """The same, where tokens enter from boundary states unless they are always computed.

        Args:
            enters: as the attribute.

        Raises:
            ValueError: the program stops between layers itself, or chooses tokens.
        """
        if enters is None:
            return self
        enters = np.where(self.always, -1, enters).astype(np.int32)
        cuts = np.unique(enters[enters >= 0]).tolist()
        if not cuts:
            return self
        if self.program != Fixed():
            raise ValueError(f"{self.program} has no stages at which tokens enter")
        return replace(self, program=Staged(tuple(cuts)), enters=enters)

    @property
    def computable(self) -> BoolArray:
        """bool `[stop - start]`: tokens that may be computed."""
        return np.ones_like(self.always) if self.held is None else ~self.held

    def holding(self, held: BoolArray) -> Recipe:
        """The same without some tokens, of which none is computed; of the others the same share
        is chosen.

        Args:
            held: bool `[stop - start]`: reused tokens.

        Raises:
            ValueError: every token passes some of the layers.
        """
        if not held.any():
            return self
        if self.program.dense_layers:
            raise ValueError(f"{self.program} computes every token, and those of images cannot be")
        candidates = self.candidates
        left = int((candidates & ~held).sum())
        return replace(
            self,
            always=self.always & ~held,
            probes=self.probes & ~held,
            top_k=min(left, round(self.top_k * left / max(1, int(candidates.sum())))),
            kept=held if self.kept is None else self.kept | held,
            held=held,
        )

    @property
    def leaves_a_choice(self) -> bool:
        """Whether only the workers know which tokens are computed at every layer."""
        chooses_all = self.top_k >= int(self.candidates.sum())
        return self.top_k > 0 and (self.program.may_choose_fewer or not chooses_all)

    @property
    def candidates(self) -> BoolArray:
        """bool `[stop - start]`: tokens that may be chosen."""
        return ~self.always if self.kept is None else ~(self.always | self.kept)

    @property
    def settled(self) -> BoolArray:
        """bool `[stop - start]`: tokens computed at every layer, whatever is chosen."""
        chooses_all = self.top_k > 0 and not self.leaves_a_choice
        return self.always | self.candidates if chooses_all else self.always

    def also(self, tokens: BoolArray) -> Recipe:
        """The same, with other tokens computed at every layer, too.

        Where those that do not probe are computed before the choice, the ones behind probes probe.

        Args:
            tokens: bool `[stop - start]`.
        """
        tokens = tokens & self.computable
        always, probes = self.always | tokens, self.probes
        if self.program.computes_before_choice and probes.any():
            behind = np.arange(len(probes)) > probes.argmax()
            probes = probes | (tokens & behind)
        top_k = min(self.top_k, int((self.candidates & ~tokens).sum()))
        return replace(self, always=always, probes=probes, top_k=top_k)

    def tested(self, halo: Halo, pieces: Pieces, start: int) -> tuple[Recipe, Acceptance | None]:
        """The same, with the halos of similar segments computed, too.

        Args:
            halo: that the server asks for.
            pieces: that are copied.
            start: of the plan.

        Returns:
            The recipe, and the test of these segments; None: nothing of them can be rejected.
        """
        acceptance = acceptance_of(halo, pieces, start)
        if acceptance is None:
            return self, None
        recipe = self.also(acceptance.halos(len(self.always)))
        has_bound = halo.max_drift is not None
        return recipe, acceptance if has_bound and not recipe.settled.all() else None

    def counts(self, chosen: int, behind: int = 0) -> Counts:
        """Tokens by what is done with them.

        Args:
            chosen: by their score.
            behind: tokens behind the plan that are computed and probed with it.
        """
        always, probes = int(self.always.sum()), int(self.probes.sum())
        entering = tuple(int(np.sum(self.enters == cut)) for cut in self.program.cuts)
        tokens = len(self.always) + behind
        return Counts(tokens, always + behind, chosen, probes + behind, entering)


class AcceptanceOutcome(NamedTuple):
    """What came of the test of a plan's similar segments.

    Attributes:
        drifts: of each segment, how far its halo was off (`prefill/acceptance.py`).
        added: reused tokens that were computed because of it, and else would not have been.
        again: tokens of the second round: these, and those that had been computed behind them.
    """

    drifts: tuple[float, ...]
    added: int = 0
    again: int = 0


class PlanOutcome(NamedTuple):
    """What the workers report of a plan.

    Attributes:
        computed: tokens that were computed at all layers behind the dense ones, in the first round
            of a plan that tests similar segments.
        drift: see `prefill/drift.py`; None: not measured.
        in_full: everything was computed after that, because the drift was above `max_drift`.
        positions: of the tokens that were computed, ascending; None: the plan does not explain.
        acceptance: of similar segments; None: not tested, or everything was computed.
        restoration: number of the plan's restoration; 0: it has none.
        is_restored: whether what it restores is in place, on all ranks. If not, it was computed.
    """

    computed: int
    drift: float | None = None
    in_full: bool = False
    positions: tuple[int, ...] | None = None
    acceptance: AcceptanceOutcome | None = None
    restoration: int = 0
    is_restored: bool = False


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
        acceptance: the test of its similar segments; None: all are accepted, or computed.
        numbers: int32 `[3, num_tokens + 1]`: time, height and width of the tokens, up to that at
            `stop`, by which M-RoPE rotates; None: a prompt of text, whose tokens have their index
            in all three.
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
    acceptance: Acceptance | None = None
    restoration: Restoration | None = None
    is_restored: bool | None = None
    left_out: int = 0
    numbers: IntArray | None = None

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
    def moved(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose copies are read, if they are reused."""
        moved = ~self.recipe.always
        return moved if self.acceptance is None else moved | self.acceptance.halos(len(moved))

    @property
    def num_tested(self) -> int:
        """Similar segments that may be rejected."""
        return 0 if self.acceptance is None else len(self.acceptance.first)

    @property
    def num_reused(self) -> int:
        """Tokens whose KV is copied."""
        return self.pieces.num_tokens

    @property
    def num_held(self) -> int:
        """Reused tokens that are never computed."""
        held = self.recipe.held
        return 0 if held is None else int(held.sum())

    @property
    def num_entering(self) -> int:
        """Reused tokens that are moved at some layers, and computed above."""
        enters = self.recipe.enters
        return 0 if enters is None else int((enters >= 0).sum())

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
        if self.acceptance is not None or self.recipe.leaves_a_choice:
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
            return self.num_reused - self.num_held
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
        held = self.recipe.held
        recipe = Recipe.without_choice(tokens if held is None else tokens & ~held)
        return replace(self, recipe=replace(recipe, held=held), acceptance=None)

    def second_round(self, drifts: Sequence[float], computed: BoolArray) -> ReusePlan | None:
        """What is left to be computed once halos were compared: the rest of rejected segments, and
        what was computed behind the first of it, since that attended to what had been moved.

        Args:
            drifts: of each similar segment.
            computed: bool `[stop - start]`: tokens that were computed so far.

        Returns:
            The plan; None: there is nothing left.
        """
        assert self.acceptance is not None
        left = self.acceptance.rejected(drifts, self.num_tokens) & ~computed
        if not left.any():
            return None
        behind = np.arange(self.num_tokens) > left.argmax()
        enters = self.recipe.enters
        attended = computed if enters is None else computed | (enters >= 0)
        return self.computing(left | (attended & behind))

    def computed_by(self, recipe: Recipe, halo: Halo) -> ReusePlan:
        """The same reuse, with another recipe.

        Args:
            recipe: without halos.
            halo: of similar segments.
        """
        if self.recipe.held is not None:
            recipe = recipe.holding(self.recipe.held)
        recipe, acceptance = recipe.tested(halo, self.pieces, self.start)
        recipe = recipe.entering(self.pieces.enters(self.start, self.stop))
        return replace(
            self,
            recipe=recipe,
            acceptance=acceptance,
            next_token=self.token_at_stop if recipe.program.probes_next_token else None,
            reports=recipe.program.reports or acceptance is not None,
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
        self, layers: ModelLayers, num_tokens: int, outcome: PlanOutcome | None = None
    ) -> float:
        """The work as a share of that of full prefill behind the prefix hit.

        Args:
            layers: of the model.
            num_tokens: of the request; those behind the plan are computed by vLLM.
            outcome: of the plan; None: the most that it computes, if every similar segment is
                accepted.
        """
        by_vllm = (num_tokens - self.stop) * layers.count  # the last token, as a rule
        chosen = None if outcome is None else self.num_chosen(outcome.computed)
        computed = self.layer_tokens(layers, chosen) + by_vllm
        if outcome is not None and outcome.in_full:  # once more, and all of it
            computed += self.in_full().layer_tokens(layers)
        if outcome is not None and outcome.acceptance is not None:
            computed += outcome.acceptance.again * layers.count
        return round(computed / ((num_tokens - self.begin) * layers.count), 4)

    @property
    def active_tokens(self) -> int:
        """Most tokens of `[start, stop)` that any layer of the pass computes."""
        return self.recipe.program.most_active(self.recipe.counts(self.recipe.top_k))
