# SPDX-License-Identifier: Apache-2.0
"""Layer programs: which layers run on which tokens, and how tokens are chosen in between.

Each is a loop around one primitive, *run layers [a, b) on these tokens* (`Layers.layers`), and one
measure, the attention that queries pay to keys of the cache (`Layers.attention_paid`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch

from vllm_segreuse.cache.plan import Recipe, Score
from vllm_segreuse.kernels.pages import PageLayout, flat_pages
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.fast_ops import FastOps
from vllm_segreuse.prefill.layers import Collected, DecoderStack, LayerState
from vllm_segreuse.prefill.tokens import Index, TokenTable

Computed = tuple[torch.Tensor, LayerState | None]
"""Flat indices of the tokens computed last, and what entered their last layer."""


class Layers:
    """Runs ranges of the model's layers on tokens of a batch.

    Args:
        stack: the model's decoder layers.
        layouts: page layout of each layer.
        attention: how the pass's queries attend.
        token_scores: the kernel that scores reused tokens.
        fast_ops: the kernels that layers prefer when they run eagerly.
        max_wave_tokens: most tokens computed at once; the size vLLM profiled its memory for.

    Attributes:
        compiled: whether passes through all layers run as vLLM has compiled them; set once it has.
    """

    compiled = False

    def __init__(
        self,
        stack: DecoderStack,
        layouts: list[PageLayout],
        attention: PassAttention,
        token_scores: Callable[..., torch.Tensor],
        fast_ops: FastOps,
        max_wave_tokens: int,
    ) -> None:
        self.stack = stack
        self.layouts = layouts
        self._attention = attention
        self._token_scores = token_scores
        self._fast_ops = fast_ops
        self._max_wave_tokens = max_wave_tokens

    def __len__(self) -> int:
        return len(self.stack)

    def layers(
        self, first: int, last: int, tokens: TokenTable, state: LayerState | None, batch: Batch
    ) -> LayerState:
        """Run layers `[first, last)`, wave by wave in order of position.

        Of the model's last layer only keys and values are computed: its output is nobody's input.
        What is returned then is what entered it.
        """
        if first == last and state is not None:
            return state
        whole = min(last, len(self.stack) - 1)
        outputs = Collected(len(tokens))
        for part, wave in self._waves(tokens):
            attending = self._attention.forward_context(wave, batch.block_tables)
            with attending, self._fast_ops.preferred():
                if state is None:
                    inputs = self.stack.embed(wave.token_ids, wave.positions)
                else:
                    inputs = state.take(part)
                output = self.stack.run(first, whole, wave.positions, inputs)
                if whole < last:
                    self.stack.write_kv(whole, wave.positions, wave.slots, output)
                outputs.add(part, output)
        return outputs.state

    def all_layers(self, tokens: TokenTable, batch: Batch) -> LayerState:
        """All layers on these tokens.

        As vLLM has compiled them where that may be: that computes the last layer's output, too, but
        starts a fraction of the kernels.
        """
        if not self.compiled:
            return self.layers(0, len(self), tokens, None, batch)
        return self._model(self._attention.forward_context, tokens, batch)

    def stock_model(self, tokens: TokenTable, batch: Batch) -> LayerState:
        """The whole model on these tokens and the stock backend.

        Returns: what left the last layer.
        """
        return self._model(self._attention.stock_context, tokens, batch)

    def _model(
        self, context: Callable[..., AbstractContextManager[None]], tokens: TokenTable, batch: Batch
    ) -> LayerState:
        outputs = Collected(len(tokens))
        for part, wave in self._waves(tokens):
            with context(wave, batch.block_tables, self.compiled):
                hidden_states = self.stack.forward(wave.token_ids, wave.positions)
            outputs.add(part, LayerState(hidden_states, None))
        return outputs.state

    def queries(self, tokens: TokenTable, batch: Batch) -> list[torch.Tensor]:
        """The queries `[tokens, heads, head_size]` of these tokens at every layer but the last,
        whose queries a pass need not compute."""
        with self._attention.captured_queries() as captured:
            if self.compiled:
                self._model(self._attention.forward_context, tokens, batch)
            else:
                self.layers(0, len(self) - 1, tokens, None, batch)
        return [torch.cat(captured[id(layer)]) for layer in self.stack.attention[:-1]]

    def keys_and_values(
        self, layer: int, tokens: TokenTable, state: LayerState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, heads, head_size]` that a layer would write for this state."""
        with self._fast_ops.preferred():
            return self.stack.keys_and_values(layer, tokens.positions, state.clone())

    def _waves(self, tokens: TokenTable) -> Iterator[tuple[slice, TokenTable]]:
        """What is computed at once, in order of position, and where it stands among the tokens."""
        for begin in range(0, len(tokens), self._max_wave_tokens):
            part = slice(begin, begin + self._max_wave_tokens)
            yield part, tokens.take(part)

    def attention_paid(
        self,
        batch: Batch,
        layer: int,
        probed: torch.Tensor,
        counts: list[int],
        queries: torch.Tensor,
    ) -> torch.Tensor:
        """Attention that queries pay, at one layer, to each token of their plan.

        Args:
            batch: the plans.
            layer: whose keys, written by now, are attended to.
            probed: flat indices of the queries' tokens, ascending.
            counts: how many of them are each plan's.
            queries: `[probed, heads, head_size]`.

        Returns:
            float32 `[tokens]`.
        """
        attention = self.stack.attention[layer]
        pages, keys = flat_pages(attention.kv_cache), self.layouts[layer].keys
        paid, first = [], 0
        lengths = np.diff(batch.bounds).tolist()
        for row, (plan, length) in enumerate(zip(batch.plans, lengths, strict=True)):
            mine = slice(first, first + counts[row])
            first += counts[row]
            mass = self._token_scores(
                queries[mine],
                probed[mine] - int(batch.bounds[row]) + plan.start,
                pages,
                keys,
                batch.block_tables[row],
                plan.start + length,
                attention.impl.scale,
            )
            paid.append(mass[plan.start :])
        return torch.cat(paid)


def program_of(recipe: Recipe) -> Callable[[Layers, Batch], Computed]:
    """The program that carries out recipes like this one."""
    if recipe.stock:
        return stock
    if not recipe.top_k:
        return fixed
    return {Score.ATTENTION: attended, Score.DEVIATION: deviating, Score.ALL_LAYERS: asked}[
        recipe.score
    ]


def stock(layers: Layers, batch: Batch) -> Computed:
    """What vLLM itself would do with these tokens: to the last bit the same, wherever its results
    do not depend on the batch."""
    active = batch.always
    state = layers.stock_model(batch.tokens.take(active), batch) if len(active) else None
    return active.device, state


def fixed(layers: Layers, batch: Batch) -> Computed:
    """No choice to make: the active tokens of every layer are known."""
    dense_layers = batch.plans[0].recipe.dense_layers
    active = batch.always
    tokens = batch.tokens.take(active)
    if not dense_layers:
        return active.device, layers.all_layers(tokens, batch) if len(active) else None
    state = layers.layers(0, dense_layers, batch.tokens, None, batch).take(active.device)
    if len(active):
        state = layers.layers(dense_layers, len(layers), tokens, state, batch)
    return active.device, state


def attended(layers: Layers, batch: Batch) -> Computed:
    """SparseX, algorithm 1: dense up to the boundary, score there, sparse from there on."""
    dense_layers = batch.plans[0].recipe.dense_layers
    boundary = max(dense_layers, 1)
    probes = batch.probes
    first = batch.everything if dense_layers else batch.always
    assert first.host is not None
    assert probes.host is not None
    wanted = np.flatnonzero(np.isin(first.host, probes.host))
    with layers.stack.capture_queries(boundary - 1, wanted) as captured:
        state = layers.layers(0, boundary, batch.tokens.take(first), None, batch)
    queries, counts = torch.cat(captured), batch.counts(probes)
    scores = layers.attention_paid(batch, boundary - 1, probes.device, counts, queries)
    chosen = batch.choose(scores, batch.always_mask(), _top_k(batch))
    active = Index.computed(torch.cat([batch.always.device, chosen.device]).sort().values)
    tokens = batch.tokens.take(active)
    if not dense_layers:  # the first layer once more, for some: cheaper than to stop behind it
        return active.device, layers.all_layers(tokens, batch)
    state = state.take(active.device)
    return active.device, layers.layers(boundary, len(layers), tokens, state, batch)


def deviating(layers: Layers, batch: Batch) -> Computed:
    """CacheBlend: dense up to the boundary, compare keys and values there with the reused ones."""
    boundary = batch.plans[0].recipe.dense_layers
    state = layers.layers(0, boundary, batch.tokens, None, batch)
    computed = layers.keys_and_values(boundary, batch.tokens, state)
    pages = flat_pages(layers.stack.attention[boundary].kv_cache)
    layout = layers.layouts[boundary]
    distance = torch.zeros(len(batch.tokens), device=pages.device)
    for new, strides in zip(computed, (layout.keys, layout.values), strict=True):
        held = batch.held(pages, strides)
        distance += (new.float() - held.float()).square().sum((1, 2))
    chosen = batch.choose(distance, batch.always_mask(), _top_k(batch))
    active = Index.computed(torch.cat([batch.always.device, chosen.device]).sort().values)
    tokens, state = batch.tokens.take(active), state.take(active.device)
    return active.device, layers.layers(boundary, len(layers), tokens, state, batch)


def asked(layers: Layers, batch: Batch) -> Computed:
    """The probes alone through the layers, and then all that is chosen together with the new."""
    scores = _paid_at_all_layers(layers, batch)
    chosen = batch.choose(scores, batch.always_mask(), _top_k(batch))
    active = Index.computed(torch.cat([batch.always.device, chosen.device]).sort().values)
    return active.device, layers.all_layers(batch.tokens.take(active), batch)


def _paid_at_all_layers(layers: Layers, batch: Batch) -> torch.Tensor:
    """Attention that the probes pay to each token of their plan, summed over all layers but the
    last."""
    probes, counts = batch.probes, batch.counts(batch.probes)
    total = torch.zeros(len(batch.tokens), device=probes.device.device)
    for layer, queries in enumerate(layers.queries(batch.tokens.take(probes), batch)):
        total += layers.attention_paid(batch, layer, probes.device, counts, queries)
    return total


def _top_k(batch: Batch) -> list[int]:
    return [plan.recipe.top_k for plan in batch.plans]
