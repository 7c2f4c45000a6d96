# SPDX-License-Identifier: Apache-2.0
"""What programs consist of: *run layers [a, b) on these tokens*, and the attention that queries
pay to keys of the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_segreuse.compat.lora_manager import Adapters
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.kv_format import kv_scales
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.layer_state import Collected, LayerInputs, LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.plan import Gather, ModelLayers, Stock
from vllm_segreuse.plan.programs import LAST_PROBES
from vllm_segreuse.prefill.attention import PassAttention, Queries, Watching
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.graphs import CudaGraphs
from vllm_segreuse.prefill.rows import EAGER, Execution
from vllm_segreuse.prefill.states import BoundaryStates
from vllm_segreuse.prefill.tokens import Index, TokenTable, upload


class ForDrafts(NamedTuple):
    """What drafts are given of each token, beside its id.

    Attributes:
        output: whether that is what the model returns.
        entering: layers, ascending, whose inputs it is.
    """

    output: bool = False
    entering: tuple[int, ...] = ()


NOTHING = ForDrafts()
"""Of models that nothing drafts for, or a model of its own."""


class PassSettings(NamedTuple):
    """How a model's layers run in passes.

    Attributes:
        fast_ops: the kernels that layers prefer when they run eagerly.
        adapters: the model's LoRA adapters.
        max_chunk_tokens: most tokens computed at once; the size vLLM profiled its memory for.
        compiled: whether passes through all layers run as vLLM has compiled them.
    """

    fast_ops: FastOps
    adapters: Adapters
    max_chunk_tokens: int
    compiled: bool = False


def model_layers(kinds: list[AttentionKind], sharing: int = 0, is_last: bool = True) -> ModelLayers:
    """The layers of a model, as programs see them.

    Args:
        kinds: of those that write KV.
        sharing: how many share it.
        is_last: whether no other stage writes more of it.
    """
    asked = kinds[:-1] if is_last else kinds
    scored = [index for index, kind in enumerate(asked) if kind.sees_all]
    return ModelLayers(len(kinds), tuple(scored), sharing)


class Onward(Protocol):
    """What takes states to the next pipeline stage."""

    def send_states(self, index: Index, state: LayerState) -> None:
        """What has left the layers here.

        Args:
            index: tokens of the batch.
            state: theirs, which may change as soon as this returns.
        """


class LayerRunner:
    """Runs ranges of the model's layers on tokens of a batch, chunk by chunk.

    Between chunks nothing of the model or its attention is changed.

    Args:
        stack: the model's decoder layers.
        layers: what is known of the attention of each.
        attention: how the pass's queries attend.
        settings: how they run.
        states: where tokens enter between layers; None: nowhere.
        for_drafts: what drafts are given of each token.
        stage: which of the model's layers the stack has; None: all. Programs run on the first
            stage, and count all layers of the model; the others `follow`.

    Attributes:
        stack, attention, settings, states, stage: as given.
        known: what is known of the attention of each layer.
        turning_alike: of each layer, the first one whose keys turn as its own do.
        model: the layers, as programs see them; of the scored ones those that the stack has.
        layouts: page layout of each layer.
        own_layers: those that the stack has.
        graphs: by which compiled passes run where one is large enough; set once they are proven.
        onward: to the next stage; None: nobody is told.
    """

    graphs: CudaGraphs | None = None
    onward: Onward | None = None

    def __init__(
        self,
        stack: DecoderStack,
        layers: list[LayerKv],
        attention: PassAttention,
        settings: PassSettings,
        states: BoundaryStates | None = None,
        for_drafts: ForDrafts = NOTHING,
        stage: Stage | None = None,
    ) -> None:
        self.stack = stack
        self.stage = Stage.alone(len(layers)) if stage is None else stage
        self._for_drafts = for_drafts
        self.states = states
        self.own_layers = model_layers(
            [layer.kind for layer in layers], len(stack.behind), self.stage.is_last
        )
        scored = tuple(self.stage.first + layer for layer in self.own_layers.scored)
        self.model = replace(self.own_layers, count=self.stage.num_layers, scored=scored)
        self.layouts = [layer.layout for layer in layers]
        self.known = layers
        self.turning_alike = [
            next(i for i, other in enumerate(layers) if layer.turns_like(other)) for layer in layers
        ]
        self.attention = attention
        self.settings = settings

    def __len__(self) -> int:
        return self.stage.num_layers

    def own(self, layers: Iterable[int]) -> list[int]:
        """Of some layers of the model those that the stack has, by their number there."""
        first, stop = self.stage.first, self.stage.stop
        return [layer - first for layer in layers if first <= layer < stop]

    def run(
        self,
        first: int,
        last: int,
        tokens: TokenTable,
        state: LayerState | None,
        batch: Batch,
        watching: Watching | None = None,
    ) -> Chunks[LayerState]:
        """Run layers `[first, last)`, chunk by chunk in order of position. The given state is lost:
        what is returned takes its place.

        Of the model's last layer only keys and values are computed: its output is nobody's input.
        What is returned then is what entered it. Where drafts are given the output, it is computed,
        and returned. Layers of other stages are theirs to run, on what is handed on here; what is
        returned then is that.
        """
        if first == last and state is not None:
            return state
        hands_on = last > self.stage.stop
        whole = last if self._for_drafts.output else min(last, len(self) - 1)
        whole = min(whole, self.stage.stop)
        outputs = Collected(len(tokens), state)
        asked = 0 if watching is None else watching.num_scored
        most = batch.chunk_tokens(self.settings.max_chunk_tokens, last - first + asked)
        for part, chunk in self.attention.parts(tokens, most):
            attending = self.attention.forward_context(chunk, batch.block_tables, watching=watching)
            with (
                attending,
                self.settings.fast_ops.preferred(),
                self.settings.adapters.applied(batch.lora_id, len(chunk)),
            ):
                if state is None:
                    entering, given = self.stack.embed(chunk.token_ids, chunk.rotary_positions)
                else:
                    entering = state.take(part)
                    given = self.stack.inputs(chunk.token_ids, chunk.rotary_positions)
                output = self._through(first, whole, chunk, given, entering, batch)
                if hands_on:
                    self._send(chunk, output, batch)
                elif whole < last:
                    self.stack.write_kv(whole, given, self._slots(whole, chunk, batch), output)
                elif last == len(self):
                    made = self.stack.output(chunk.token_ids, chunk.rotary_positions, output)
                    output = LayerState(made, None)
                outputs.add(part, output)
            scoring = 0 if watching is None else watching.take_work()
            yield len(chunk) * (last - first) + scoring
        return outputs.state

    def _send(self, chunk: TokenTable, state: LayerState, batch: Batch) -> None:
        if self.onward is not None:
            self.onward.send_states(batch.index_of(chunk), state)

    def follow(
        self, index: Index, handed: LayerState, batch: Batch, watching: Watching | None = None
    ) -> LayerState:
        """All layers of a later stage on tokens that an earlier one hands on, and further on from
        here.

        Args:
            index: the tokens.
            handed: what the model is given of them; it is spent.
            batch: the plans.
            watching: is told what reaches attention, but where the program is `Stock`.

        Returns:
            What is handed on; of the last stage, what entered its last layer, or left it where the
            program is `Stock`.
        """
        tokens = batch.tokens.take(index)
        outputs = Collected(len(tokens))
        forward: Callable[[TokenTable, Batch], LayerState] = self._stock
        if not isinstance(batch.program, Stock):
            forward = functools.partial(self._layers_of_stage, watching=watching)
        for part, chunk in self.attention.parts(tokens, self.settings.max_chunk_tokens):
            given = self.stack.given(handed.take(part))
            with given, self.settings.adapters.applied(batch.lora_id, len(chunk)):
                output = forward(chunk, batch)
            if not self.stage.is_last:
                self._send(chunk, output, batch)
            outputs.add(part, output)
        return outputs.state

    def _stock(self, chunk: TokenTable, batch: Batch) -> LayerState:
        with self.attention.stock_context(chunk, batch.block_tables, EAGER):
            return self._own_forward(chunk)

    def _own_forward(self, chunk: TokenTable) -> LayerState:
        """The model's own, as far as this stage has it."""
        if self.stack.hands_on:
            return self.stack.forward_to_next(chunk.token_ids, chunk.rotary_positions)
        return LayerState(self.stack.forward(chunk.token_ids, chunk.rotary_positions), None)

    def _layers_of_stage(
        self, chunk: TokenTable, batch: Batch, watching: Watching | None
    ) -> LayerState:
        whole = len(self.stack) - self.stage.is_last
        with (
            self.attention.forward_context(chunk, batch.block_tables, watching=watching),
            self.settings.fast_ops.preferred(),
        ):
            entered, given = self.stack.embed(chunk.token_ids, chunk.rotary_positions)
            output = self.stack.run(0, whole, given, entered)
            if self.stage.is_last:
                self.stack.write_kv(whole, given, self._slots(whole, chunk, batch), output)
        return output

    def _slots(self, layer: int, chunk: TokenTable, batch: Batch) -> torch.Tensor:
        """Where a layer writes some of the batch's tokens."""
        return batch.slots_of(chunk, self.known[layer].table)

    def _through(
        self,
        first: int,
        last: int,
        chunk: TokenTable,
        given: LayerInputs,
        state: LayerState,
        batch: Batch,
    ) -> LayerState:
        """Layers `[first, last)` on a chunk; what drafts are given on the way is kept."""
        stops = [layer for layer in self._for_drafts.entering if first <= layer <= last]
        for layer in stops:
            state = self.stack.run(first, layer, given, state)
            batch.keep_auxiliary(layer, chunk, state.stream)
            first = layer
        return self.stack.run(first, last, given, state)

    def keep(self, state: LayerState, index: torch.Tensor) -> LayerState:
        """The states of some rows, ascending, in the place of all."""
        return state.kept(index, self.settings.max_chunk_tokens)

    def is_finite(self, state: LayerState) -> torch.Tensor:
        """bool `[tokens]`: whether all numbers of each state are."""
        finite = torch.ones_like(state.hidden_states[:, 0], dtype=torch.bool)
        for part in (state.hidden_states, state.residual):
            if part is not None:
                chunks = part.split(self.settings.max_chunk_tokens)
                finite &= torch.cat([chunk.isfinite().all(-1) for chunk in chunks])
        return finite

    def note_finite(self, state: LayerState, tokens: TokenTable, batch: Batch) -> None:
        """Plans of which some of these tokens' states are not finite are not `sound`. Of the suffix
        nothing is seen later."""
        batch.sound &= batch.of_all(tokens.request, self.is_finite(state))

    def enter(
        self, cut: int, active: Index, state: LayerState | None, batch: Batch
    ) -> tuple[Index, LayerState | None]:
        """Tokens that enter at a cut join those that have come there.

        Args:
            cut: a layer.
            active: tokens that all layers before it were run on.
            state: theirs, if there are any.
            batch: the plans.

        Returns:
            All of them, and their state.
        """
        entering = batch.entering(cut)
        if not len(entering):
            return active, state
        assert self.states is not None
        stream = self.states.at(cut, batch.tokens.slots[entering.device])
        entered = self.stack.state_of(stream, cut)
        if state is None:
            return entering, entered
        assert active.host is not None
        assert entering.host is not None
        both = np.concatenate([active.host, entering.host])
        order = np.argsort(both)
        device = stream.device
        state = state.followed_by(entered).take(upload(order, device))
        return Index.known(both[order], device), state

    def all_layers(
        self, tokens: TokenTable, batch: Batch, watching: Watching | None = None
    ) -> Chunks[LayerState]:
        """All layers on these tokens.

        As vLLM has compiled them where that may be: that computes the last layer's output, too, but
        starts a fraction of the kernels.
        """
        if not self.settings.compiled:
            return (yield from self.run(0, len(self), tokens, None, batch, watching))
        context = functools.partial(self.attention.forward_context, watching=watching)
        return (yield from self._model(context, tokens, batch, watching))

    def stock_model(self, tokens: TokenTable, batch: Batch) -> Chunks[LayerState]:
        """The whole model on these tokens and the stock backend.

        Returns: what left the last layer.
        """
        return (yield from self._model(self.attention.stock_context, tokens, batch))

    def _model(
        self,
        context: Callable[..., AbstractContextManager[None]],
        tokens: TokenTable,
        batch: Batch,
        watching: Watching | None = None,
    ) -> Chunks[LayerState]:
        outputs = Collected(len(tokens))
        graphs = self.graphs if self.settings.compiled else None
        asked = 0 if watching is None else watching.num_scored
        most = batch.chunk_tokens(self.settings.max_chunk_tokens, len(self) + asked)
        for part, chunk in self.attention.parts(tokens, most):
            size = 0 if graphs is None else graphs.size_for(chunk)
            attending = context(chunk, batch.block_tables, Execution(self.settings.compiled, size))
            with attending, self.settings.adapters.applied(batch.lora_id, len(chunk)):
                output, entering = self._whole_model(chunk, size)
            if self.stack.hands_on:
                self._send(chunk, output, batch)
            for layer, stream in zip(self._for_drafts.entering, entering, strict=True):
                batch.keep_auxiliary(layer, chunk, stream)
            outputs.add(part, output)
            scoring = 0 if watching is None else watching.take_work()
            yield len(chunk) * len(self) + scoring
        return outputs.state

    def _whole_model(
        self, chunk: TokenTable, size: int
    ) -> tuple[LayerState, Sequence[torch.Tensor]]:
        """What leaves it, and what enters the layers whose inputs drafts are given.

        Args:
            size: of the CUDA graph; 0: none.
        """
        if self.stack.hands_on:
            return self._own_forward(chunk), ()
        if size and self.graphs is not None:
            hidden_states, entering = self.graphs.forward(chunk, size)
        else:
            hidden_states, entering = self.stack.forward_for_drafts(
                chunk.token_ids, chunk.rotary_positions
            )
        return LayerState(hidden_states, None), entering

    def up_to_choice(
        self, wanted: Index, computed: Index, last: int, queries: Queries, batch: Batch
    ) -> Chunks[tuple[Index, LayerState]]:
        """The layers that some tokens are asked at, and all layers on the others that are computed
        with them.

        Args:
            wanted: the tokens, behind the others of their plan.
            computed: they, and all before them whose keys and values are not there yet.
            last: the last layer whose queries are wanted; `wanted` runs no further.
            queries: hands them on.
            batch: the plans.

        Returns:
            The others; and what entered the last layer of these, or left it where the model is
            compiled.
        """
        tokens = batch.tokens.take(computed)
        others = computed.without(wanted)
        rows = upload(others.within(computed), tokens.slots.device)
        if self.settings.compiled:
            context = functools.partial(self.attention.forward_context, watching=queries)
            state = yield from self._model(context, tokens, batch, queries)
            self.note_finite(state, tokens, batch)
            return others, self.keep(state, rows)
        behind = last + 1
        state = yield from self.run(0, behind, tokens, None, batch, queries)
        self.note_finite(state, tokens, batch)
        state = self.keep(state, rows)
        if len(others):
            left = batch.tokens.take(others)
            state = yield from self.run(behind, len(self), left, state, batch)
        return others, state

    def keys_and_values(
        self, layer: int, tokens: TokenTable, state: LayerState, batch: Batch
    ) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
        """Keys and values `[tokens, heads, channels]` that a layer would write for this state,
        chunk by chunk, and of which tokens they are."""
        for part, chunk in tokens.parts(self.settings.max_chunk_tokens):
            asking: AbstractContextManager[None] = nullcontext()
            if self.stack.asks_model:
                asking = self.attention.no_attention(chunk)
            with (
                asking,
                self.settings.fast_ops.preferred(),
                self.settings.adapters.applied(batch.lora_id, len(chunk)),
            ):
                entering = state.take(part).clone()
                given = self.stack.inputs(chunk.token_ids, chunk.rotary_positions)
                made = self.stack.keys_and_values(layer, given, entering)
            yield part, made

    def attention_scores(
        self,
        batch: Batch,
        layer: int,
        part: slice,
        queries: torch.Tensor,
        gather: Gather = Gather.SUM,
    ) -> torch.Tensor:
        """Attention that probes pay, at one layer, to each token of their plan.

        Args:
            batch: the plans.
            layer: whose keys, written by now, are attended to.
            part: which of the batch's probes ask.
            queries: theirs, `[probes, heads, head_size]`.
            gather: how what several queries and heads pay becomes one number: the largest under
                `MAX`, else the sum.

        Returns:
            float32 `[tokens]`; `[2, tokens]` under `SUM_AND_LAST`: by all, and by the last.
        """
        attention, known = self.stack.attention[layer], self.known[layer]
        tables = batch.table(known.table)
        pages, keys = known.pages, known.layout.attended
        scale = attention.impl.scale * kv_scales(attention).key
        more = known.softmax()
        probed, paid = batch.probes.device[part], []
        lengths = np.diff(batch.bounds).tolist()
        ends = batch.probe_ends
        for row, (plan, length, end) in enumerate(zip(batch.plans, lengths, ends, strict=True)):
            first = max(ends[row - 1] if row else 0, part.start)
            stop = max(first, min(end, part.stop))
            mine = slice(first - part.start, stop - part.start)
            if gather is Gather.SUM_AND_LAST:
                more["last"] = max(0, stop - max(first, end - LAST_PROBES))
            mass = known.kernels.token_scores(
                queries[mine],
                probed[mine] + (plan.start - int(batch.bounds[row])),
                pages,
                keys,
                tables[row],
                plan.start + length,
                scale,
                gather is Gather.MAX,
                **more,
            )
            paid.append(mass[..., plan.start :])
        return paid[0] if len(paid) == 1 else torch.cat(paid, -1)
