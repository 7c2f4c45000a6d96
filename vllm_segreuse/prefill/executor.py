# SPDX-License-Identifier: Apache-2.0
"""The sparse pass: everything a step's plans need, before vLLM's own forward of that step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from vllm_segreuse.kernels.page_tokens import write_tokens
from vllm_segreuse.plan import ModelLayers, PlanOutcome, Program, ReusePlan
from vllm_segreuse.prefill import outcomes, programs
from vllm_segreuse.prefill.align import Aligner, block_copies, token_copies
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks, T, finish
from vllm_segreuse.prefill.drafts import DraftRunner
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.outcomes import Computed
from vllm_segreuse.prefill.states import BoundaryStates


@dataclass
class PassReport:
    """What one step's pass took, and the requests that had to be computed in full.

    Attributes:
        align_s, sparse_s: seconds of both halves.
        not_finite: requests whose pass met NaN or infinity.
        outcomes: of plans that report one, or were not finite, by request.
    """

    align_s: float
    sparse_s: float
    not_finite: list[str]
    outcomes: dict[str, PlanOutcome]


@dataclass(frozen=True)
class Prepared:
    """Plans that are laid out and aligned, by program and adapter.

    Attributes:
        seconds: what that took.
        chunk_work: see `Batch`.
    """

    batches: list[Batch]
    seconds: float
    chunk_work: int | None

    @property
    def plans(self) -> list[ReusePlan]:
        """Of all batches."""
        return [plan for batch in self.batches for plan in batch.plans]


RunProgram = Callable[[LayerRunner, Batch], Chunks[programs.Computed]]
"""Computes the plans of a batch."""


class SparsePrefill:
    """Runs plans on the loaded model.

    Args:
        layers: the model's decoder layers, run on a batch's tokens.
        aligner: copies and rotates KV, that of drafts, too.
        drafts: computes the KV of a draft; None: nothing drafts that has any.
        run_program: computes a batch; None: its program does.

    Attributes:
        aligner: as given.
        runner: the model's decoder layers, as given.
    """

    def __init__(
        self,
        layers: LayerRunner,
        aligner: Aligner,
        drafts: DraftRunner | None = None,
        run_program: RunProgram | None = None,
    ) -> None:
        self.runner = layers
        self._run_program = run_program
        self.aligner = aligner
        self._drafts = drafts
        self._block_size = layers.layouts[0].keys.shape[1]
        self._device = layers.stack.attention[0].kv_cache.device

    def with_aligner(self, aligner: Aligner) -> SparsePrefill:
        """The same pass on KV that another aligner copies: one that reads a second tier."""
        return SparsePrefill(self.runner, aligner, self._drafts, self._run_program)

    @property
    def layers(self) -> ModelLayers:
        """The model's, as programs see them."""
        return self.runner.model

    @property
    def own_layers(self) -> ModelLayers:
        """Those that are in this process: of one pipeline stage, if there are several."""
        return self.runner.own_layers

    @property
    def states(self) -> BoundaryStates | None:
        """What tokens may enter from."""
        return self.runner.states

    def after_forward(self) -> AbstractContextManager[None]:
        """To compute in, between the forward of a step and its end; see `CudaGraphs`."""
        graphs = self.runner.graphs
        return nullcontext() if graphs is None else graphs.after_forward()

    def run(self, plans: list[ReusePlan]) -> PassReport:
        """Fill the KV of `[start, stop)` of every plan; plans with equal programs and the same
        adapter share passes."""
        return finish(self.compute(self.prepare(plans)))

    @torch.inference_mode()
    def prepare(
        self, plans: list[ReusePlan], chunk_work: int | None = None, apart: bool = False
    ) -> Prepared:
        """All that needs no other tensor-parallel rank: lay the plans out, and align them.

        Args:
            plans: of one step.
            chunk_work: see `Batch`.
            apart: they are computed in full, one at a time: what a step computes together fits
                into memory as long as plans reuse.
        """
        started = time.perf_counter()
        self.aligner.restore(block_copies(plans, self._block_size))
        together = [[plan] for plan in plans] if apart else [plans]
        batches = [batch for group in together for batch in self._batches(group, chunk_work)]
        for batch in batches:
            dense = max(0, batch.program.dense_layers - self.runner.stage.first)
            for table in range(1, self.aligner.num_tables):
                copies = token_copies(batch.plans, self._block_size, True, table)
                self.aligner.align(copies, dense, table)
            copies = token_copies(batch.plans, self._block_size, skip_always=True)
            self.aligner.align(copies, first_layer=dense)
            if self.states is not None:
                self.states.move(copies)
            if apart:
                self._clear(batch)
        return Prepared(batches, time.perf_counter() - started, chunk_work)

    @torch.inference_mode()
    def compute(self, prepared: Prepared) -> Chunks[PassReport]:
        """Compute what prepared plans leave to be computed.

        A plan whose scores or hidden states are not finite is computed again, in full: what it
        reused may be the reason. So is one whose drift is above what its request allows. Of one
        whose similar segments are rejected, the rest of these is computed in a second round. That
        attends to no moved token to which the halo in front of it has not attended, so that it
        meets nothing that is not finite.
        Tensor-parallel ranks hold the same hidden states, choose by the same scores and measure the
        same drifts, so they agree on it.
        """
        clock = _Clock()
        computed = []
        for batch in prepared.batches:
            computed.append((yield from clock.running(self.compute_batch(batch))))
        ends = outcomes.read(computed)
        wanted = {end.plan.request_id for end in ends if end.wants_positions}
        positions: dict[str, tuple[int, ...]] = {}
        for batch, active, _ in computed:
            positions |= batch.positions(active, wanted)
        del computed
        not_finite, reported = [], {}
        for end in ends:
            plan = end.plan
            outcome, left = end.outcome(positions.get(plan.request_id))
            if not end.fine:
                not_finite.append(plan.request_id)
            if plan.reports or not end.fine:
                shown = outcome if plan.explains else outcome._replace(positions=None)
                reported[plan.request_id] = shown
            if left is not None:  # alone: the states of one prompt fit into memory
                [batch] = self._batches([left], prepared.chunk_work)
                self._clear(batch)
                yield from clock.running(self.compute_batch(batch))
        return PassReport(
            align_s=prepared.seconds,
            sparse_s=clock.seconds(),
            not_finite=not_finite,
            outcomes=reported,
        )

    def _clear(self, batch: Batch) -> None:
        """The slots of what is computed, of a draft, too: vLLM's kernel for CPUs reads a block to
        its end, and what is no number stays that, also with a weight of zero."""
        for layer in self.aligner.layers:
            slots = batch.slots(batch.always.device, layer.table)
            for part in layer.parts:
                heads, _, channels = part.strides.shape
                zeros = layer.pages.new_zeros(len(slots), heads, channels)
                write_tokens(layer.pages, part.strides, slots, zeros)

    def _batches(self, plans: list[ReusePlan], chunk_work: int | None) -> list[Batch]:
        """Plans by what they share a pass with: their program, their adapter, and whether they have
        images, beside which nothing is carried (`carried.py`)."""
        groups: dict[tuple[Program, int, bool], list[ReusePlan]] = {}
        for plan in plans:
            key = plan.recipe.program, plan.lora_id, plan.mrope_positions is None
            groups.setdefault(key, []).append(plan)
        return [
            Batch(group, self._block_size, self._device, chunk_work) for group in groups.values()
        ]

    @torch.inference_mode()
    def compute_batch(self, batch: Batch, run: RunProgram | None = None) -> Chunks[Computed]:
        """Run plans of one program, and the draft on what it has computed.

        Args:
            run: computes the batch; None: as all others are.
        """
        run = run or self._run_program or programs.run
        active, state = yield from run(self.runner, batch)
        if self._drafts is not None:
            yield from self._drafts.run(batch, active, state)
        request = batch.tokens.request[active]
        finite = torch.ones_like(request, dtype=torch.bool)
        if state is not None:
            finite &= self.runner.is_finite(state)
        return Computed(batch, batch.at_all_layers(active), batch.of_all(request, finite))


class _Clock:
    """Seconds of work, without the time between chunks."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, time.perf_counter()

    def running(self, chunks: Chunks[T]) -> Chunks[T]:
        """The same chunks, with the clock stopped in between."""
        while True:
            try:
                work = next(chunks)
            except StopIteration as end:
                result: T = end.value
                return result
            self._total += time.perf_counter() - self._since
            yield work
            self._since = time.perf_counter()

    def seconds(self) -> float:
        """So far."""
        return self._total + time.perf_counter() - self._since
