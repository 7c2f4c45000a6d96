# SPDX-License-Identifier: Apache-2.0
"""Carries plans out on models of which some layers hand a state on: stretch by stretch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.layers import StateLayers
from segreuse_extras.states.messages import PlanStates
from segreuse_extras.states.rows import StateRows
from segreuse_extras.states.stack import StateStack
from vllm_segreuse.plan import ModelLayers, PlanOutcome, ReusePlan
from vllm_segreuse.prefill.align import Aligner, token_copies
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


class StatesPrefill(SparsePrefill):
    """Moves the KV of whole segments, composes their states, and has the model's own forward
    compute what is between them, each stretch from the state that is in front of it.

    Args:
        stack: the model.
        states: its layers that hand a state on.
        rows: forward contexts.
        aligner: moves KV of the other layers.
        captures: maps that are there, and those that are noted.
        max_tokens: most that are computed at once.

    Attributes:
        states, captures: as given.
        given: what plans need beside their pieces, by request; of the step under way.
    """

    def __init__(
        self,
        stack: StateStack,
        states: StateLayers,
        rows: StateRows,
        aligner: Aligner,
        captures: Captures,
        max_tokens: int,
    ) -> None:
        self.state_layers, self.captures = states, captures
        self.aligner = aligner
        self._stack, self._rows, self._max_tokens = stack, rows, max_tokens
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
            ended = plan
            if not self._carry_out(plan):
                not_finite.append(plan.request_id)
                ended = plan.without_copies()
                self._carry_out(ended)
            if ended.reports:
                computed = int(ended.recipe.settled.sum())
                outcomes[plan.request_id] = PlanOutcome(computed)
            yield plan.num_tokens * self._stack.num_layers
        seconds = time.perf_counter() - started
        return PassReport(prepared.seconds, seconds, not_finite, outcomes)

    def _carry_out(self, plan: ReusePlan) -> bool:
        """Whether what was computed is finite."""
        given = self.given[plan.request_id]
        self.state_layers.begin(given.running, given.before)
        is_computed = plan.recipe.settled
        at, finite = plan.start, True
        for segment in given.segments:
            if is_computed[segment.first - plan.start]:
                continue  # all of the plan is
            finite &= self._compute(plan, given, at, segment.first)
            self.state_layers.compose(given.running, self.captures.maps[segment.segment])
            at = segment.stop
        return self._compute(plan, given, at, plan.stop) and finite

    def _compute(self, plan: ReusePlan, given: PlanStates, first: int, stop: int) -> bool:
        finite = True
        self._rows.running = given.running
        for begin in range(first, stop, self._max_tokens):
            end = min(stop, begin + self._max_tokens)
            tokens, table = self._tokens(plan, begin, end)
            with (
                self._rows.forward_context(tokens, table),
                self.captures.computing(plan.request_id, begin, end - begin),
            ):
                hidden = self._stack.forward(tokens.token_ids, tokens.positions)
            finite = finite and bool(hidden.isfinite().all())
        return finite

    def _tokens(self, plan: ReusePlan, first: int, stop: int) -> tuple[TokenTable, torch.Tensor]:
        """Tokens of a plan, and their request's block table."""
        positions = np.arange(first, stop, dtype=np.int64)
        blocks = plan.block_ids[positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        ids = plan.token_ids[first - plan.start : stop - plan.start].astype(np.int64)
        request = np.zeros_like(positions)
        table = TokenTable(*(upload(it, self._device) for it in (ids, positions, request, slots)))
        return table, upload(plan.block_ids[None], self._device)
