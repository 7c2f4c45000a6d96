# SPDX-License-Identifier: Apache-2.0
"""How the pass's queries attend: in rows of the stock backend, or scattered, by a kernel of ours.

Long runs of neighbouring queries are what the stock kernels are made for. Scattered ones would be
rows of one token each, and each would read the whole context alone. On CPUs ours is as fast for
long runs, too.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_segreuse.compat.attention_impl import (
    absorbed_queries,
    replaced_forward,
    stock_forward,
)
from vllm_segreuse.model import token_kv
from vllm_segreuse.model.kv_format import kv_scales, plain_queries
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.prefill.rows import (
    EAGER,
    Execution,
    RowBuilder,
    has_long_runs,
    pass_context,
)
from vllm_segreuse.prefill.tables import BlockTables
from vllm_segreuse.prefill.tokens import TokenTable, upload


@dataclass
class ScatteredQueries:
    """Attention metadata of the sparse-query kernel, instead of a backend's own.

    `schedule` is made by the first of the layers that share it.
    """

    block_tables: torch.Tensor
    request: torch.Tensor
    positions: torch.Tensor
    schedule: Any = None

    def in_chunks(self, chunk: int, blocks: int) -> ScatteredQueries:
        """The same queries where each attends to its own chunk only: every chunk is a request of
        its own, as in vLLM's `make_local_attention_virtual_batches`, and so each kernel masks it.

        Args:
            chunk: its tokens.
            blocks: its blocks.
        """
        width = self.block_tables.shape[1]
        chunks = -(-width // blocks)
        tables = torch.nn.functional.pad(self.block_tables, (0, chunks * blocks - width))
        request = self.request * chunks + self.positions // chunk
        return ScatteredQueries(tables.view(-1, blocks), request, self.positions % chunk)


class Watching(ABC):
    """Is told what reaches attention during a pass, layer by layer and chunk by chunk; also of a
    compiled model, which calls no hooks.

    Args:
        layers: vLLM `Attention` layers that are watched.
    """

    num_scored = 0
    """Layers at which it computes scores."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._seen = [0] * len(layers)

    @abstractmethod
    def of(self, layer: torch.nn.Module, query: torch.Tensor) -> AbstractContextManager[None]:
        """Attention of a chunk at a layer.

        Args:
            layer: a vLLM `Attention` layer, which has written the chunk's keys and values, unless
                it is a latent one.
            query: of the chunk, as the layer is given them.
        """

    def take_work(self) -> int:
        """Queries that were scored since the last call."""
        return 0

    def chunk_of(self, layer: torch.nn.Module, count: int) -> tuple[int, slice] | None:
        """The number of a layer, and which of the pass's tokens the next chunk of so many is there;
        None: the layer is not watched."""
        number = self._numbers.get(id(layer))
        if number is None:
            return None
        first = self._seen[number]
        self._seen[number] = first + count
        return number, slice(first, first + count)


class Queries(Watching):
    """Hands on queries that reach attention.

    Args:
        layers: vLLM `Attention` layers whose queries are wanted.
        selected: which of them, counted over all chunks, ascending.
        ask: is given the number of one of these layers, which of the selected queries are in the
            chunk, and these queries, `[tokens, heads, channels]` as scores take them, once the
            chunk's keys are written.
    """

    def __init__(
        self,
        layers: list[torch.nn.Module],
        selected: np.ndarray,
        ask: Callable[[int, slice, torch.Tensor], None],
    ) -> None:
        super().__init__(layers)
        self.num_scored = len(layers)
        self._selected = selected
        self._ask = ask
        self._chunks: dict[tuple[int, int], tuple[slice, torch.Tensor]] = {}
        self._asked = 0

    @contextmanager
    def of(self, layer: torch.nn.Module, query: torch.Tensor) -> Iterator[None]:
        """Attention of a chunk at a layer, which may overwrite the queries that it is given."""
        found = self.chunk_of(layer, len(query))
        if found is None:
            yield
            return
        number, chunk = found
        part, rows = self._in_chunk(chunk.start, chunk.stop, query.device)
        if not len(rows):
            yield
            return
        channels = token_kv.query_channels(layer)
        query = plain_queries(layer, query).view(-1, layer.num_heads, channels)[rows]
        if token_kv.is_latent(layer):
            query = absorbed_queries(layer, query)
        yield
        self._asked += len(query)
        self._ask(number, part, query)

    def _in_chunk(self, first: int, last: int, device: torch.device) -> tuple[slice, torch.Tensor]:
        """Which of the selected ones are among `[first, last)`, and where: the same at each
        layer."""
        if (first, last) not in self._chunks:
            part = slice(*np.searchsorted(self._selected, [first, last]).tolist())
            self._chunks[first, last] = part, upload(self._selected[part] - first, device)
        return self._chunks[first, last]

    def take_work(self) -> int:
        """Queries that were handed on since the last call: to score by one takes about what its
        attention does."""
        work, self._asked = self._asked, 0
        return work


class PassAttention:
    """The attention of a model's layers, during a pass.

    Args:
        rows: builds rows of the stock backend.
        layers: of the model.
    """

    def __init__(self, rows: RowBuilder, layers: list[LayerKv]) -> None:
        self._rows = rows
        self._layers = {id(layer.attention): layer for layer in layers}
        with_kernel = [layer for layer in layers if layer.kernels.sparse_attention is not None]
        self._by_kernel = [layer.attention for layer in with_kernel]
        long_runs = [layer.kernels.long_run for layer in with_kernel]
        self._long_run = max((it for it in long_runs if it is not None), default=None)
        self._in_rows = [
            layer.attention for layer in layers if layer.kernels.sparse_attention is None
        ]
        # Layers of equal shape share a schedule.
        alike: dict[Any, list[str]] = {}
        for layer in with_kernel:
            kind = layer.kind
            shape = (layer.layout, layer.attention.num_heads, kind.window, layer.table, kind.chunk)
            alike.setdefault(shape, []).append(layer.attention.layer_name)
        self._alike = [(names, *shape[-2:]) for shape, names in alike.items()]
        self._block_size = layers[0].layout.keys.shape[1]
        self._tables = BlockTables(1 + max(layer.table for layer in layers), self._block_size)
        self._least_splits = 1

    def parts(self, tokens: TokenTable, most: int) -> Iterator[tuple[slice, TokenTable]]:
        """Tokens by what is computed at once, in order of position, and where they stand.

        Args:
            tokens: the active tokens.
            most: tokens at once.
        """
        for part, chunk in tokens.parts(most):
            fitting = self._rows.most_tokens(chunk)
            if len(chunk) <= fitting:
                yield part, chunk
                continue
            for within, smaller in chunk.parts(fitting):
                first = part.start + within.start
                yield slice(first, first + len(smaller)), smaller

    @property
    def splits_keys(self) -> bool:
        """Whether kernels may divide the keys of a query among programs."""
        return any(it.kernels.plan_attention is not None for it in self._layers.values())

    @contextmanager
    def splitting_keys(self, programs: int) -> Iterator[None]:
        """Meanwhile the keys of a query are divided among so many programs at least.

        Kernels do that in passes with few queries over long contexts. The contexts of the start-up
        proof are too short for it.
        """
        self._least_splits = programs
        try:
            yield
        finally:
            self._least_splits = 1

    def stock_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, execution: Execution
    ) -> AbstractContextManager[None]:
        """Forward context in which the whole model computes these tokens as vLLM would.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`; of all tables, one behind the other.
            execution: how the model runs.
        """
        return self._rows.forward_context(tokens, block_tables, execution)

    def no_attention(self, tokens: TokenTable) -> AbstractContextManager[None]:
        """Forward context in which these tokens attend to nothing, and write no KV."""
        return pass_context(self._rows.vllm_config, {}, tokens, EAGER)

    @contextmanager
    def forward_context(
        self,
        tokens: TokenTable,
        block_tables: torch.Tensor,
        execution: Execution = EAGER,
        watching: Watching | None = None,
    ) -> Iterator[None]:
        """Forward context in which the model's attention layers compute these tokens.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`; of all tables, one behind the other.
            execution: how the model runs.
            watching: is told what reaches attention.
        """
        in_rows = self._long_run is not None and has_long_runs(tokens, self._long_run)
        if in_rows or not self._by_kernel:
            with (
                watched(self._by_kernel + self._in_rows, watching, len(tokens)),
                self._rows.forward_context(tokens, block_tables, execution),
            ):
                yield
            return
        attend: Callable[..., torch.Tensor] = self._attend
        if watching is not None:
            attend = _told(watching, attend, len(tokens))
        with (
            replaced_forward(self._by_kernel, attend),
            watched(self._in_rows, watching, len(tokens)),
            pass_context(
                self._rows.vllm_config,
                self._metadata(tokens, block_tables),
                tokens,
                execution,
                self._slots(tokens, block_tables),
            ),
        ):
            yield

    def _slots(
        self, tokens: TokenTable, block_tables: torch.Tensor
    ) -> dict[str, torch.Tensor] | None:
        """Where the tokens are written, by layer; None: at the same slots in all of them."""
        if self._tables.count == 1:
            return None
        slots = [self._tables.slots(tokens, block_tables, it) for it in range(self._tables.count)]
        return {it.attention.layer_name: slots[it.table] for it in self._layers.values()}

    def _metadata(self, tokens: TokenTable, block_tables: torch.Tensor) -> dict[str, Any]:
        """Of scattered queries, by layer; the stock backend's where there is no kernel."""
        metadata: dict[str, Any] = {}
        if self._in_rows:
            metadata = self._rows.metadata(tokens, block_tables)
        for names, table, chunk in self._alike:
            blocks = self._tables.of(block_tables, table)
            scattered = ScatteredQueries(blocks, tokens.request, tokens.positions)
            if chunk:
                scattered = scattered.in_chunks(chunk, chunk // self._block_size)
            metadata |= dict.fromkeys(names, scattered)
        return metadata

    def _attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        queries: ScatteredQueries,
        output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        known, scales = self._layers[id(layer)], kv_scales(layer)
        kernels, layout = known.kernels, known.layout
        assert kernels.sparse_attention is not None
        count = len(queries.positions)  # what is behind is padding of a CUDA graph
        query = plain_queries(layer, query[:count])
        where = (queries.block_tables, queries.request, queries.positions)
        more, window = known.softmax(), known.kind.window
        if window:
            more["window"] = window
        if kernels.plan_attention is not None:
            if queries.schedule is None:
                planned = kernels.plan_attention(query, layout.keys, *where, window=window)
                splits = max(planned.splits, self._least_splits)
                queries.schedule = replace(planned, splits=splits)
            more["schedule"] = queries.schedule
        kernels.sparse_attention(
            output[:count],
            query,
            known.pages,
            layout.keys,
            layout.values,
            *where,
            layer.impl.scale * scales.key,
            value_scale=scales.value,
            **more,
        )
        return output


def watched(
    layers: list[torch.nn.Module], watching: Watching | None, count: int
) -> AbstractContextManager[None]:
    """Meanwhile somebody is told what layers that attend in rows are given of so many tokens; None:
    nobody is."""
    if watching is None:
        return nullcontext()
    return replaced_forward(layers, _told(watching, stock_forward, count))


def _told(
    watching: Watching, attend: Callable[..., torch.Tensor], count: int
) -> Callable[..., torch.Tensor]:
    """`attend`, of which somebody is told what it is given of the pass's `count` tokens, without
    padding."""

    @functools.wraps(attend)
    def attend_and_tell(
        layer: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        with watching.of(layer, query[:count]):
            return attend(layer, query, *args, **kwargs)

    return attend_and_tell
