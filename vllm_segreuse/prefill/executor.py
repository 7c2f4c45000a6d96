# SPDX-License-Identifier: Apache-2.0
"""The sparse pass: everything a step's plans need, before vLLM's own forward of that step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from vllm_segreuse.cache.plan import ReusePlan
from vllm_segreuse.kernels.pages import PageLayout, flat_pages
from vllm_segreuse.prefill.align import Aligner, token_copies
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.fast_norms import fast_norms
from vllm_segreuse.prefill.layers import DecoderStack, LayerState
from vllm_segreuse.prefill.rows import TokenTable
from vllm_segreuse.prefill.selection import choose_top_k


@dataclass
class PassReport:
    """What one step's pass took, and the requests that had to be computed in full.

    Attributes:
        align_s, sparse_s: seconds of both halves.
        not_finite: requests whose pass met NaN or infinity.
    """

    align_s: float
    sparse_s: float
    not_finite: list[str]


class _Batch:
    """Tokens `[start, stop)` of plans with one program, as flat tensors.

    Attributes:
        tokens: every token, by plan, then by position.
        always: bool `[tokens]`; see `Recipe`.
        bounds: first token of each plan, and the end.
        block_tables: int32 `[plans, blocks]`.
    """

    def __init__(self, plans: list[ReusePlan], block_size: int, device: torch.device) -> None:
        self.plans = plans
        widest = max(len(plan.block_ids) for plan in plans)
        tables = np.zeros((len(plans), widest), dtype=np.int32)
        for row, plan in zip(tables, plans, strict=True):
            row[: len(plan.block_ids)] = plan.block_ids
        lengths = [plan.num_tokens for plan in plans]
        request = np.repeat(np.arange(len(plans)), lengths)
        positions = np.concatenate([np.arange(p.start, p.stop) for p in plans])
        slots = tables[request, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        ids = np.concatenate([p.token_ids for p in plans]).astype(np.int64)
        self.tokens = TokenTable(tensor(ids), tensor(positions), tensor(request), tensor(slots))
        self.always = tensor(np.concatenate([p.recipe.always for p in plans]))
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.block_tables = tensor(tables)


@dataclass(frozen=True)
class Prepared:
    """Plans that are laid out and aligned, by program.

    Attributes:
        seconds: what that took.
    """

    batches: list[_Batch]
    seconds: float


class SparsePrefill:
    """Runs plans on the loaded model.

    Args:
        stack: the model's decoder layers.
        layouts: page layout of each layer.
        aligner: copies and rotates KV.
        attention: how the pass's queries attend.
        token_scores: the kernel that scores reused tokens.
        max_wave_tokens: most tokens computed at once; the size vLLM profiled its memory for.
    """

    def __init__(
        self,
        stack: DecoderStack,
        layouts: list[PageLayout],
        aligner: Aligner,
        attention: PassAttention,
        token_scores: Callable[..., torch.Tensor],
        max_wave_tokens: int,
    ) -> None:
        self._stack = stack
        self._layouts = layouts
        self._aligner = aligner
        self._attention = attention
        self._token_scores = token_scores
        self._block_size = layouts[0].keys.shape[1]
        self._max_wave_tokens = max_wave_tokens
        self._device = stack.attention[0].kv_cache.device

    def run(self, plans: list[ReusePlan]) -> PassReport:
        """Fill the KV of `[start, stop)` of every plan; plans with one program share passes."""
        return self.compute(self.prepare(plans))

    @torch.inference_mode()
    def prepare(self, plans: list[ReusePlan]) -> Prepared:
        """All that needs no other tensor-parallel rank: lay the plans out, and align them."""
        started = time.perf_counter()

        def program(plan: ReusePlan) -> tuple[int, bool]:
            return plan.recipe.dense_layers, plan.recipe.top_k > 0

        groups = [list(group) for _, group in groupby(sorted(plans, key=program), key=program)]
        batches = [_Batch(group, self._block_size, self._device) for group in groups]
        for group in groups:
            copies = token_copies(group, self._block_size, self._device, skip_always=True)
            self._aligner.align(copies, first_layer=group[0].recipe.dense_layers)
        return Prepared(batches, time.perf_counter() - started)

    @torch.inference_mode()
    def compute(self, prepared: Prepared) -> PassReport:
        """Compute what prepared plans leave to be computed.

        A plan whose hidden states are not finite is computed again, in full: what it reused may be
        the reason. Tensor-parallel ranks hold the same hidden states, so they agree on it.
        """
        started = time.perf_counter()
        with fast_norms():
            spoilt = [plan for batch in prepared.batches for plan in self._compute(batch)]
            if spoilt:
                in_full = [plan.in_full() for plan in spoilt]
                self._compute(_Batch(in_full, self._block_size, self._device))
        return PassReport(
            align_s=prepared.seconds,
            sparse_s=time.perf_counter() - started,
            not_finite=[plan.request_id for plan in spoilt],
        )

    def _compute(self, batch: _Batch) -> list[ReusePlan]:
        """Run plans of one program; returns those whose hidden states are not finite."""
        recipe = batch.plans[0].recipe
        compute = self._compute_selected if recipe.top_k else self._compute_fixed
        active, state = compute(batch, recipe.dense_layers)
        return [] if state is None else _not_finite(batch, active, state)

    def _compute_fixed(
        self, batch: _Batch, dense_layers: int
    ) -> tuple[torch.Tensor, LayerState | None]:
        """No choice to make: the active tokens of every layer are known.

        Returns:
            Flat indices of the tokens computed last, and what entered their last layer.
        """
        active = batch.always.nonzero().flatten()
        state = None
        if dense_layers:
            state = self._layers(0, dense_layers, batch.tokens, None, batch).take(active)
        if len(active):
            active_tokens = batch.tokens.take(active)
            state = self._layers(dense_layers, len(self._stack), active_tokens, state, batch)
        return active, state

    def _compute_selected(
        self, batch: _Batch, dense_layers: int
    ) -> tuple[torch.Tensor, LayerState | None]:
        """SparseX, algorithm 1: dense up to the boundary, score there, sparse from there on.

        Returns: as `_compute_fixed`.
        """
        boundary = max(dense_layers, 1)
        always = batch.always.nonzero().flatten()
        probed = torch.arange(len(batch.tokens), device=self._device) if dense_layers else always
        with self._stack.capture_queries(boundary - 1) as queries:
            state = self._layers(0, boundary, batch.tokens.take(probed), None, batch)
        chosen = self._select(batch, boundary - 1, probed, torch.cat(queries))
        active = torch.cat([always, chosen]).sort().values
        if dense_layers:
            state = state.take(active)
        else:
            # Keys and values of the first layer depend on the token alone: what the new tokens read
            # of the chosen ones there was exact already, so these may follow.
            late = self._layers(0, boundary, batch.tokens.take(chosen), None, batch)
            order = torch.cat([always, chosen]).argsort()
            state = LayerState.concatenate([state, late]).take(order)
        state = self._layers(boundary, len(self._stack), batch.tokens.take(active), state, batch)
        return active, state

    def _select(
        self, batch: _Batch, layer: int, probed: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        """Flat indices of the reused tokens to recompute, ascending."""
        attention = self._stack.attention[layer]
        pages, keys = flat_pages(attention.kv_cache), self._layouts[layer].keys
        scores, firsts = [], batch.bounds[:-1].tolist()
        for row, (plan, first) in enumerate(zip(batch.plans, firsts, strict=True)):
            probes = torch.from_numpy(plan.recipe.probes).to(self._device).nonzero().flatten()
            where = torch.searchsorted(probed, probes + first)
            mass = self._token_scores(
                queries[where],
                probes + plan.start,
                pages,
                keys,
                batch.block_tables[row],
                plan.stop,
                attention.impl.scale,
            )
            candidates = ~batch.always[first : first + plan.num_tokens]
            scores.append(mass[plan.start :].masked_fill(~candidates, float("-inf")))
        chosen = choose_top_k(scores, [plan.recipe.top_k for plan in batch.plans])
        return torch.cat([part + first for part, first in zip(chosen, firsts, strict=True)])

    def _layers(
        self, first: int, last: int, tokens: TokenTable, state: LayerState | None, batch: _Batch
    ) -> LayerState:
        """Run layers `[first, last)`, wave by wave in order of position.

        Of the model's last layer only keys and values are computed: its output is nobody's input.
        What is returned then is what entered it.
        """
        if first == last and state is not None:
            return state
        whole = min(last, len(self._stack) - 1)
        outputs = []
        for begin in range(0, len(tokens), self._max_wave_tokens):
            part = slice(begin, begin + self._max_wave_tokens)
            wave = tokens.take(part)
            with self._attention.forward_context(wave, batch.block_tables):
                if state is None:
                    inputs = self._stack.embed(wave.token_ids, wave.positions)
                else:
                    inputs = state.take(part)
                output = self._stack.run(first, whole, wave.positions, inputs)
                if whole < last:
                    self._stack.write_kv(whole, wave.positions, wave.slots, output)
                outputs.append(output)
        return LayerState.concatenate(outputs)


def _not_finite(batch: _Batch, active: torch.Tensor, state: LayerState) -> list[ReusePlan]:
    """The plans with NaN or infinity in the given states of their active tokens."""
    finite = state.hidden_states.isfinite().all(-1)
    if state.residual is not None:
        finite &= state.residual.isfinite().all(-1)
    if bool(finite.all()):
        return []
    rows = batch.tokens.request[active[~finite]].unique().tolist()
    return [batch.plans[row] for row in rows]
