# SPDX-License-Identifier: Apache-2.0
"""How the pass's queries attend: in rows of the stock backend, or scattered, by a kernel of ours.

Long runs of neighbouring queries are what the stock kernels are made for. Scattered ones would be
rows of one token each, and each would read the whole context alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from vllm_segreuse.compat.attention_impl import replaced_forward
from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.pages import PageLayout, flat_pages
from vllm_segreuse.prefill.rows import RowBuilder, pass_context
from vllm_segreuse.prefill.tokens import TokenTable, row_starts

LONG_RUN = 16
"""Tokens per run, on average, from which on rows are at least as fast (`bench kernels`)."""


@dataclass
class ScatteredQueries:
    """Attention metadata of the sparse-query kernel, in the place of a backend's own.

    `schedule` is made by the first layer, for all of them.
    """

    block_tables: torch.Tensor
    request: torch.Tensor
    positions: torch.Tensor
    schedule: Any = None


class PassAttention:
    """The attention of a model's layers, during a pass.

    Args:
        rows: builds rows of the stock backend.
        attention: vLLM `Attention` layers, in layer order.
        layouts: page layout of each.
        kernels: the kernels in use.
    """

    def __init__(
        self,
        rows: RowBuilder,
        attention: list[torch.nn.Module],
        layouts: list[PageLayout],
        kernels: Kernels,
    ) -> None:
        self._rows = rows
        self._layers = {id(layer): layout for layer, layout in zip(attention, layouts, strict=True)}
        self._impls = [layer.impl for layer in attention]
        self._kernels = kernels
        self._captured: dict[int, list[torch.Tensor]] | None = None

    def stock_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, compiled: bool
    ) -> AbstractContextManager[None]:
        """Forward context in which the whole model computes these tokens as vLLM would.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`.
            compiled: let it run as vLLM has compiled it.
        """
        return self._rows.forward_context(tokens, block_tables, compiled)

    @contextmanager
    def forward_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, compiled: bool = False
    ) -> Iterator[None]:
        """Forward context in which the model's attention layers compute these tokens.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`.
            compiled: let the model run as vLLM has compiled it, if it runs as a whole.
        """
        if self._kernels.sparse_attention is None or _has_long_runs(tokens):
            watched: AbstractContextManager[None] = nullcontext()
            if self._captured is not None:
                watched = replaced_forward(self._impls, self._attend_in_rows)
            with watched, self._rows.forward_context(tokens, block_tables, compiled):
                yield
            return
        queries = ScatteredQueries(block_tables, tokens.request, tokens.positions)
        config, names = self._rows.vllm_config, self._rows.layer_names
        with (
            replaced_forward(self._impls, self._attend),
            pass_context(config, names, queries, tokens, compiled),
        ):
            yield

    @contextmanager
    def captured_queries(self) -> Iterator[dict[int, list[torch.Tensor]]]:
        """Collects the queries `[tokens, heads, head_size]` that reach attention, {id of layer: by
        wave}; also those of a compiled model, which calls no hooks."""
        self._captured = {id_: [] for id_ in self._layers}
        try:
            yield self._captured
        finally:
            self._captured = None

    def _attend_in_rows(
        self, layer: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._capture(layer, query)
        return type(layer.impl).forward(layer.impl, layer, query, *args, **kwargs)

    def _capture(self, layer: torch.nn.Module, query: torch.Tensor) -> None:
        if self._captured is not None:
            # The backend may reuse the projection's memory once attention is done.
            shape = (-1, layer.num_heads, layer.head_size)
            self._captured[id(layer)].append(query.view(shape).clone())

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
        assert self._kernels.sparse_attention is not None
        self._capture(layer, query)
        layout = self._layers[id(layer)]
        where = (queries.block_tables, queries.request, queries.positions)
        prepared = {}
        if self._kernels.plan_attention is not None:
            if queries.schedule is None:
                queries.schedule = self._kernels.plan_attention(query, layout.keys, *where)
            prepared["schedule"] = queries.schedule
        self._kernels.sparse_attention(
            output,
            query,
            flat_pages(kv_cache),
            layout.keys,
            layout.values,
            *where,
            layer.impl.scale,
            **prepared,
        )
        return output


def _has_long_runs(tokens: TokenTable) -> bool:
    """Where only the device knows the tokens, most were chosen one by one: asking would cost more
    than it could save."""
    return tokens.host is not None and len(tokens) >= LONG_RUN * int(row_starts(tokens).sum())
