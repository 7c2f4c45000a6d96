# SPDX-License-Identifier: Apache-2.0
"""Layer programs: which layers run on which tokens, and how tokens are chosen in between.

Each is a loop around one primitive, *run layers [a, b) on these tokens* (`Layers.layers`), and one
measure, the attention that queries pay to keys of the cache (`Layers.attention_paid`).

A program is a generator: it stops behind each wave and yields the work done, in layer-tokens (one
token computed at one layer), so that whoever runs it may let others run in between (`backlog.py`).
Between waves nothing of the model or its attention is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import torch

from vllm_segreuse.kernels.pages import PageLayout, flat_pages
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.layers import Collected, DecoderStack, LayerState
from vllm_segreuse.plan import Recipe, Score
from vllm_segreuse.prefill.attention import PassAttention, Queries
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.tokens import TokenTable

T = TypeVar("T")

Waves = Generator[int, None, T]
"""Work in waves: yields the layer-tokens of each; its result is what the last one made."""

Computed = tuple[torch.Tensor, LayerState | None]
"""Flat indices of the tokens computed last, and what entered their last layer."""


def finish(waves: Waves[T]) -> T:
    """All waves at once."""
    while True:
        try:
            next(waves)
        except StopIteration as end:
            result: T = end.value
            return result


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
        self,
        first: int,
        last: int,
        tokens: TokenTable,
        state: LayerState | None,
        batch: Batch,
        queries: Queries | None = None,
    ) -> Waves[LayerState]:
        """Run layers `[first, last)`, wave by wave in order of position.

        Of the model's last layer only keys and values are computed: its output is nobody's input.
        What is returned then is what entered it.
        """
        if first == last and state is not None:
            return state
        whole = min(last, len(self.stack) - 1)
        outputs = Collected(len(tokens))
        for part, wave in self._waves(tokens, last - first, batch):
            attending = self._attention.forward_context(wave, batch.block_tables, queries=queries)
            with attending, self._fast_ops.preferred():
                if state is None:
                    inputs = self.stack.embed(wave.token_ids, wave.positions)
                else:
                    inputs = state.take(part)
                output = self.stack.run(first, whole, wave.positions, inputs)
                if whole < last:
                    self.stack.write_kv(whole, wave.positions, wave.slots, output)
                outputs.add(part, output)
            yield len(wave) * (last - first)
        return outputs.state

    def all_layers(self, tokens: TokenTable, batch: Batch) -> Waves[LayerState]:
        """All layers on these tokens.

        As vLLM has compiled them where that may be: that computes the last layer's output, too, but
        starts a fraction of the kernels.
        """
        if not self.compiled:
            return (yield from self.layers(0, len(self), tokens, None, batch))
        return (yield from self._model(self._attention.forward_context, tokens, batch))

    def stock_model(self, tokens: TokenTable, batch: Batch) -> Waves[LayerState]:
        """The whole model on these tokens and the stock backend.

        Returns: what left the last layer.
        """
        return (yield from self._model(self._attention.stock_context, tokens, batch))

    def _model(
        self, context: Callable[..., AbstractContextManager[None]], tokens: TokenTable, batch: Batch
    ) -> Waves[LayerState]:
        outputs = Collected(len(tokens))
        for part, wave in self._waves(tokens, len(self), batch):
            with context(wave, batch.block_tables, self.compiled):
                hidden_states = self.stack.forward(wave.token_ids, wave.positions)
            outputs.add(part, LayerState(hidden_states, None))
            yield len(wave) * len(self)
        return outputs.state

    def queries(self, tokens: TokenTable, batch: Batch) -> Waves[list[torch.Tensor]]:
        """The queries `[tokens, heads, head_size]` of these tokens at every layer but the last,
        whose queries a pass need not compute."""
        queries = Queries(self.stack.attention[:-1])
        if self.compiled:
            context = functools.partial(self._attention.forward_context, queries=queries)
            yield from self._model(context, tokens, batch)
        else:
            yield from self.layers(0, len(self) - 1, tokens, None, batch, queries)
        return queries.by_layer()

    def keys_and_values(
        self, layer: int, tokens: TokenTable, state: LayerState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, heads, head_size]` that a layer would write for this state."""
        with self._fast_ops.preferred():
            return self.stack.keys_and_values(layer, tokens.positions, state.clone())

    def _waves(
        self, tokens: TokenTable, num_layers: int, batch: Batch
    ) -> Iterator[tuple[slice, TokenTable]]:
        """What is computed at once, in order of position, and where it stands among the tokens."""
        size = self._max_wave_tokens
        if batch.wave_work is not None:
            size = min(size, max(1, batch.wave_work // max(1, num_layers)))
        for begin in range(0, len(tokens), size):
            part = slice(begin, begin + size)
            yield part, tokens.take(part)

    def attention_paid(
        self,
        batch: Batch,
        layer: int,
        probed: torch.Tensor,
        counts: list[int],
        queries: torch.Tensor,
        highest: bool = False,
    ) -> torch.Tensor:
        """Attention that queries pay, at one layer, to each token of their plan.

        Args:
            batch: the plans.
            layer: whose keys, written by now, are attended to.
            probed: flat indices of the queries' tokens, ascending.
            counts: how many of them are each plan's.
            queries: `[probed, heads, head_size]`.
            highest: the most that one query pays with one head, instead of the sum.

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
                highest,
            )
            paid.append(mass[plan.start :])
        return torch.cat(paid)


Program = Callable[[Layers, Batch], Waves[Computed]]


def program_of(recipe: Recipe) -> Program:
    """The program that carries out recipes like this one."""
    if recipe.stock:
        return stock
    if not recipe.top_k:
        return fixed
    if recipe.score.asks_all_layers:
        return asked
    return {Score.ATTENTION: attended, Score.DEVIATION: deviating}[recipe.score]


def stock(layers: Layers, batch: Batch) -> Waves[Computed]:
    """What vLLM itself would do with these tokens: to the last bit the same, wherever its results
    do not depend on the batch."""
    active = batch.always
    if not len(active):
        return active.device, None
    return active.device, (yield from layers.stock_model(batch.tokens.take(active), batch))


def fixed(layers: Layers, batch: Batch) -> Waves[Computed]:
    """No choice to make: the active tokens of every layer are known."""
    dense_layers = batch.plans[0].recipe.dense_layers
    active = batch.always
    tokens = batch.tokens.take(active)
    if not dense_layers:
        if not len(active):
            return active.device, None
        return active.device, (yield from layers.all_layers(tokens, batch))
    state = yield from layers.layers(0, dense_layers, batch.tokens, None, batch)
    state = state.take(active.device)
    if len(active):
        state = yield from layers.layers(dense_layers, len(layers), tokens, state, batch)
    return active.device, state


def attended(layers: Layers, batch: Batch) -> Waves[Computed]:
    """SparseX, algorithm 1: dense up to the boundary, score there, sparse from there on."""
    dense_layers = batch.plans[0].recipe.dense_layers
    boundary = max(dense_layers, 1)
    probes = batch.probes
    first = batch.everything if dense_layers else batch.always
    assert first.host is not None
    assert probes.host is not None
    wanted = np.flatnonzero(np.isin(first.host, probes.host))
    queries = Queries([layers.stack.attention[boundary - 1]], wanted)
    state = yield from layers.layers(0, boundary, batch.tokens.take(first), None, batch, queries)
    [asked] = queries.by_layer()
    counts = batch.counts(probes)
    scores = layers.attention_paid(batch, boundary - 1, probes.device, counts, asked)
    active = batch.with_chosen(scores)
    tokens = batch.tokens.take(active)
    if not dense_layers:  # the first layer once more, for some: cheaper than to stop behind it
        return active.device, (yield from layers.all_layers(tokens, batch))
    state = state.take(active.device)
    state = yield from layers.layers(boundary, len(layers), tokens, state, batch)
    return active.device, state


def deviating(layers: Layers, batch: Batch) -> Waves[Computed]:
    """CacheBlend: dense up to the boundary, compare keys and values there with the reused ones."""
    boundary = batch.plans[0].recipe.dense_layers
    state = yield from layers.layers(0, boundary, batch.tokens, None, batch)
    computed = layers.keys_and_values(boundary, batch.tokens, state)
    pages = flat_pages(layers.stack.attention[boundary].kv_cache)
    layout = layers.layouts[boundary]
    distance = torch.zeros(len(batch.tokens), device=pages.device)
    for new, strides in zip(computed, (layout.keys, layout.values), strict=True):
        held = batch.held(pages, strides)
        distance += (new.float() - held.float()).square().sum((1, 2))
    active = batch.with_chosen(distance)
    tokens, state = batch.tokens.take(active), state.take(active.device)
    state = yield from layers.layers(boundary, len(layers), tokens, state, batch)
    return active.device, state


def asked(layers: Layers, batch: Batch) -> Waves[Computed]:
    """The probes alone through the layers, and then all that is chosen together with the new."""
    scores = yield from _paid_at_all_layers(layers, batch)
    active = batch.with_chosen(scores)
    return active.device, (yield from layers.all_layers(batch.tokens.take(active), batch))


def _paid_at_all_layers(layers: Layers, batch: Batch) -> Waves[torch.Tensor]:
    """Attention that the probes pay to each token of their plan at all layers but the last: its
    sum, or its peak."""
    highest = batch.plans[0].recipe.score is Score.PEAK
    gather = torch.maximum if highest else torch.add
    probes, counts = batch.probes, batch.counts(batch.probes)
    total = torch.zeros(len(batch.tokens), device=probes.device.device)
    queries = yield from layers.queries(batch.tokens.take(probes), batch)
    for layer, of_layer in enumerate(queries):
        paid = layers.attention_paid(batch, layer, probes.device, counts, of_layer, highest)
        total = gather(total, paid)
        yield len(probes)  # about what these tokens' attention at one layer takes
    return total
