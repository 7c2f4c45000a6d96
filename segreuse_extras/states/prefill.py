# SPDX-License-Identifier: Apache-2.0
"""Carries plans out on models of which some layers hand a state on: stretch by stretch, and once
more from the first segment on that the question looks up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from segreuse_extras.states.again import ReadAgain, chosen
from segreuse_extras.states.capture import Captures
from segreuse_extras.states.layers import HeldStates, StateLayers
from segreuse_extras.states.messages import Placed, PlanStates
from segreuse_extras.states.question import Question
from segreuse_extras.states.rows import StateRows
from segreuse_extras.states.stack import StateStack
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.plan import ModelLayers, PlanOutcome, ReusePlan
from vllm_segreuse.prefill.align import Aligner, token_copies
from vllm_segreuse.prefill.attention import watched
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.executor import PassReport, Prepared, SparsePrefill
from vllm_segreuse.prefill.tokens import TokenTable, upload


@dataclass(frozen=True)
class Aligned(Prepared):
    """Plans whose KV of attention layers is moved.

    Attributes:
        given: in their order.
    """

    given: tuple[ReusePlan, ...] = ()

    @property
    def plans(self) -> list[ReusePlan]:
        """See there."""
        return [*self.given]


class CarriedOut(NamedTuple):
    """What came of a plan.

    Attributes:
        finite: whether what was computed is.
        read: segments that were read again.
        twice: new tokens that were computed with them once more.
    """

    finite: bool
    read: Sequence[Placed] = ()
    twice: int = 0

    def outcome(self, plan: ReusePlan) -> PlanOutcome:
        """As it is reported."""
        computed = plan.recipe.settled.copy()
        for it in self.read:
            computed[it.first - plan.start : it.stop - plan.start] = True
        where = np.flatnonzero(computed)
        positions = tuple((where + plan.start).tolist()) if plan.explains else None
        return PlanOutcome(len(where), positions=positions, again=self.twice)


class StatesPrefill(SparsePrefill):
    """Moves the KV of whole segments, composes their states, and has the model's own forward
    compute what is between them, each stretch from the state that is in front of it.

    Where a plan chooses, the question is read next. From the state in front of the first segment
    that it chooses, all is done once more: what is chosen and what is new is computed, the rest is
    composed. What the question has left is lost then; vLLM's forward reads it again.

    Args:
        stack: the model.
        states: its layers that hand a state on.
        rows: forward contexts.
        kv: the other layers.
        aligner: moves their KV.
        captures: maps that are there, and those that are noted.
        max_tokens: most that are computed at once.

    Attributes:
        state_layers: those that hand a state on.
        kv, captures: as given.
        given: what plans need beside their pieces, by request; of the step under way.
    """

    def __init__(
        self,
        stack: StateStack,
        states: StateLayers,
        rows: StateRows,
        kv: Sequence[LayerKv],
        aligner: Aligner,
        captures: Captures,
        max_tokens: int,
    ) -> None:
        self.state_layers, self.captures = states, captures
        self.aligner = aligner
        self._stack, self._rows, self._max_tokens = stack, rows, max_tokens
        self.kv = kv
        self._block_size = stack.block_size
        self._device = stack.attention[0].kv_cache.device
        self.given: Mapping[str, PlanStates] = {}

    @property
    def layers(self) -> ModelLayers:
        """All of the model's: the work of a token is that of each."""
        return ModelLayers.of_full_attention(self._stack.num_layers)

    @property
    def own_layers(self) -> ModelLayers:
        """The same: there are no pipeline stages."""
        return self.layers

    @property
    def states(self) -> None:
        """Nothing enters between layers."""
        return None

    def after_forward(self) -> AbstractContextManager[None]:
        """No plan takes several steps."""
        return nullcontext()

    @torch.inference_mode()
    def prepare(
        self, plans: list[ReusePlan], chunk_work: int | None = None, apart: bool = False
    ) -> Prepared:
        """Move the KV of what is reused."""
        started = time.perf_counter()
        copies = token_copies(plans, self._block_size, skip_always=True)
        self.aligner.align(copies)
        return Aligned([], time.perf_counter() - started, chunk_work, tuple(plans))

    @torch.inference_mode()
    def compute(self, prepared: Prepared) -> Chunks[PassReport]:
        """Compute the rest; a plan whose hidden states are not finite once more, in full."""
        started = time.perf_counter()
        not_finite, outcomes = [], dict[str, PlanOutcome]()
        for plan in prepared.plans:
            ended, carried = plan, self.carry_out(plan)
            if not carried.finite:
                not_finite.append(plan.request_id)
                ended = plan.without_copies()
                self._clear_kv(ended)
                carried = self.carry_out(ended)
            if ended.reports:
                outcomes[plan.request_id] = carried.outcome(ended)
            yield plan.num_tokens * self._stack.num_layers
        seconds = time.perf_counter() - started
        return PassReport(prepared.seconds, seconds, not_finite, outcomes)

    def _clear_kv(self, plan: ReusePlan) -> None:
        """Of its own blocks, behind its last token, too: vLLM's kernel of CPUs reads a block to its
        end, and no number stays no number, also with a weight of zero."""
        blocks = plan.block_ids[plan.start // self._block_size :].tolist()
        for layer in self.kv:
            typed_pages(layer.attention)[blocks] = 0

    def carry_out(self, plan: ReusePlan) -> CarriedOut:
        """One plan, in one go or two; its KV is moved."""
        given, layers = self.given[plan.request_id], self.state_layers
        is_computed, may_be_chosen = plan.recipe.settled, plan.recipe.candidates
        moved = [it for it in given.segments if not is_computed[it.first - plan.start]]
        open_segments = [it for it in moved if may_be_chosen[it.first - plan.start]]
        fronts = {it: HeldStates() for it in open_segments}
        layers.begin(given.running, given.before)
        finite = self.go_on(plan, plan.start, moved, fronts)
        if not len(plan.suffix):
            return CarriedOut(finite)
        behind = layers.held(given.running)
        with self.captures.resting():
            read = self._choose(plan, open_segments)
            if not read:
                layers.restore(given.running, behind)
                return CarriedOut(finite and read is not None)
            first = read[0].first
            layers.restore(given.running, fronts[read[0]])
            composed = [it for it in moved if it.first > first and it not in read]
            finite &= self.go_on(plan, first, composed)
        reused = sum(it.stop - it.first for it in moved if it.first >= first)
        return CarriedOut(finite, read, plan.stop - first - reused)

    def go_on(
        self,
        plan: ReusePlan,
        at: int,
        composed: Sequence[Placed],
        fronts: dict[Placed, HeldStates] | None = None,
    ) -> bool:
        """Compute a plan from some position on, whose state is running; whether that is finite.

        Args:
            composed: segments that are not computed.
            fronts: those of them whose states in front are wanted, and these.
        """
        running, finite = self.given[plan.request_id].running, True
        for segment in composed:
            finite &= self.compute_stretch(plan, at, segment.first)
            if fronts is not None and segment in fronts:
                fronts[segment] = self.state_layers.held(running)
            self.state_layers.compose(running, self.captures.maps[segment.segment])
            at = segment.stop
        return self.compute_stretch(plan, at, plan.stop) and finite

    def _choose(self, plan: ReusePlan, segments: Sequence[Placed]) -> list[Placed] | None:
        """Read the question; which of some segments it has chosen, None: what it has made is not
        finite.

        It is read also where a plan is computed in full: what a spoilt pass has left in its slots
        would spoil vLLM's forward.
        """
        program, stop = plan.recipe.program, plan.written_until
        if not isinstance(program, ReadAgain):
            return [] if self.compute_stretch(plan, plan.stop, stop) else None
        question = Question(self.kv, upload(plan.block_ids, self._device), plan.stop, stop)
        if not self.compute_stretch(plan, plan.stop, stop, question) or not question.is_sound:
            return None
        lengths = [it.stop - it.first for it in segments]
        found = chosen(question.to(segments), lengths, program.budget, plan.recipe.top_k)
        return [segments[number] for number in found]

    def compute_stretch(
        self, plan: ReusePlan, first: int, stop: int, question: Question | None = None
    ) -> bool:
        """Compute consecutive tokens from the running state; whether that is finite.

        Args:
            question: what is to know what they look up.
        """
        finite = True
        self._rows.running = self.given[plan.request_id].running
        attention = [layer.attention for layer in self.kv]
        for begin in range(first, stop, self._max_tokens):
            end = min(stop, begin + self._max_tokens)
            tokens, table = self._tokens(plan, begin, end)
            with (
                self._rows.forward_context(tokens, table),
                watched(attention, question, end - begin),
                self.captures.computing(plan.request_id, begin, end - begin),
            ):
                hidden = self._stack.forward(tokens.token_ids, tokens.positions)
            finite = finite and bool(hidden.isfinite().all())
        return finite

    def _tokens(self, plan: ReusePlan, first: int, stop: int) -> tuple[TokenTable, torch.Tensor]:
        """Tokens of a plan, or of its question, and their request's block table."""
        positions = np.arange(first, stop, dtype=np.int64)
        blocks = plan.block_ids[positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        known, at = (plan.token_ids, plan.start) if first < plan.stop else (plan.suffix, plan.stop)
        ids = known[first - at : stop - at].astype(np.int64)
        request = np.zeros_like(positions)
        table = TokenTable(*(upload(it, self._device) for it in (ids, positions, request, slots)))
        return table, upload(plan.block_ids[None], self._device)
