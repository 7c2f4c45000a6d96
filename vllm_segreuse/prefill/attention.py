# SPDX-License-Identifier: Apache-2.0
"""How the pass's queries attend: in rows of the stock backend, or scattered, by a kernel of ours.

Long runs of neighbouring queries are what the stock kernels are made for. Scattered ones would be
rows of one token each, and each would read the whole context alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_segreuse.compat.attention_impl import replaced_forward
from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.prefill.rows import RowBuilder, pass_context
from vllm_segreuse.prefill.tokens import TokenTable, row_starts, upload

LONG_RUN = 16
"""Tokens per run, on average, from which on rows are at least as fast (`bench kernels`)."""


@dataclass
class ScatteredQueries:
    """Attention metadata of the sparse-query kernel, instead of a backend's own.

    `schedule` is made by the first layer, for all of them.
    """

    block_tables: torch.Tensor
    request: torch.Tensor
    positions: torch.Tensor
    schedule: Any = None


class Queries:
    """Collects queries that reach attention, wave by wave; also those of a compiled model, which
    calls no hooks.

    Args:
        layers: vLLM `Attention` layers whose queries are kept.
        selected: which of them, counted over all waves, ascending; None: all.
    """

    def __init__(self, layers: list[torch.nn.Module], selected: np.ndarray | None = None) -> None:
        self._layers = layers
        self._selected = selected
        self._kept: dict[int, list[torch.Tensor]] = {id(layer): [] for layer in layers}
        self._seen = dict.fromkeys(self._kept, 0)

    def keep(self, layer: torch.nn.Module, query: torch.Tensor) -> None:
        """The queries of a wave at a layer; they may be overwritten once attention is done."""
        if id(layer) not in self._kept:
            return
        query = query.view(-1, layer.num_heads, layer.head_size)
        if self._selected is None:
            query = query.clone()
        else:
            first = self._seen[id(layer)]
            self._seen[id(layer)] = last = first + len(query)
            here = self._selected[slice(*np.searchsorted(self._selected, [first, last]))]
            query = query[upload(here - first, query.device)]
        self._kept[id(layer)].append(query)

    def by_layer(self) -> list[torch.Tensor]:
        """What was collected: `[tokens, heads, head_size]` of each layer."""
        return [torch.cat(self._kept[id(layer)]) for layer in self._layers]


class PassAttention:
    """The attention of a model's layers, during a pass.

    Args:
        rows: builds rows of the stock backend.
        layers: the KV of each.
        kernels: the kernels in use.
    """

    def __init__(
        self,
        rows: RowBuilder,
        layers: list[LayerKv],
        kernels: Kernels,
    ) -> None:
        self._rows = rows
        self._layouts = {id(layer.attention): layer.layout for layer in layers}
        self._impls = [layer.attention.impl for layer in layers]
        self._kernels = kernels

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
        self,
        tokens: TokenTable,
        block_tables: torch.Tensor,
        compiled: bool = False,
        queries: Queries | None = None,
    ) -> Iterator[None]:
        """Forward context in which the model's attention layers compute these tokens.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`.
            compiled: let the model run as vLLM has compiled it, if it runs as a whole.
            queries: collects those that reach attention.
        """
        if self._kernels.sparse_attention is None or _has_long_runs(tokens):
            watched: AbstractContextManager[None] = nullcontext()
            if queries is not None:
                watched = replaced_forward(self._impls, _kept_in(queries, _attend_in_rows))
            with watched, self._rows.forward_context(tokens, block_tables, compiled):
                yield
            return
        scattered = ScatteredQueries(block_tables, tokens.request, tokens.positions)
        config, names = self._rows.vllm_config, self._rows.layer_names
        attend = self._attend if queries is None else _kept_in(queries, self._attend)
        with (
            replaced_forward(self._impls, attend),
            pass_context(config, names, scattered, tokens, compiled),
        ):
            yield

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
        layout = self._layouts[id(layer)]
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


def _attend_in_rows(
    layer: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return type(layer.impl).forward(layer.impl, layer, query, *args, **kwargs)


def _kept_in(queries: Queries, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(attend)
    def keep_and_attend(
        layer: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        queries.keep(layer, query)
        return attend(layer, query, *args, **kwargs)

    return keep_and_attend


def _has_long_runs(tokens: TokenTable) -> bool:
    """Where only the device knows the tokens, most were chosen one by one: asking would cost more
    than it could save."""
    return tokens.host is not None and len(tokens) >= LONG_RUN * int(row_starts(tokens).sum())
