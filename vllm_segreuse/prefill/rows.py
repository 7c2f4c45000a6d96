# SPDX-License-Identifier: Apache-2.0
"""Scattered query tokens as rows of the stock attention backend.

Each contiguous run of active positions becomes a row of its own: its queries, a sequence length
that ends with the run, and its request's block table. Keys and values are written to the cache
before they are read, so every backend's bottom-right-aligned causal mask is then exactly causal for
every query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class TokenTable:
    """Active tokens of several requests, sorted by request, then by position.

    Attributes:
        token_ids: int64 `[tokens]`.
        positions: int64 `[tokens]`.
        request: index of each token's request, int64 `[tokens]`.
        slots: KV slot of each token, int64 `[tokens]`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    request: torch.Tensor
    slots: torch.Tensor

    def __len__(self) -> int:
        return self.positions.numel()

    def take(self, index: torch.Tensor | slice) -> TokenTable:
        """The given rows; an index must be ascending to keep the order."""
        return TokenTable(
            self.token_ids[index], self.positions[index], self.request[index], self.slots[index]
        )


def row_starts(tokens: TokenTable) -> torch.Tensor:
    """bool `[tokens]`: where a contiguous run of positions of one request begins."""
    starts = torch.ones(len(tokens), dtype=torch.bool, device=tokens.positions.device)
    starts[1:] = (tokens.positions[1:] != tokens.positions[:-1] + 1) | (
        tokens.request[1:] != tokens.request[:-1]
    )
    return starts


@contextmanager
def pass_context(
    vllm_config: VllmConfig,
    layer_names: list[str],
    metadata: Any,
    tokens: TokenTable,
    compiled: bool = False,
) -> Iterator[None]:
    """vLLM's forward context for a pass over these tokens, with one metadata for all layers."""
    with set_forward_context(
        dict.fromkeys(layer_names, metadata),
        vllm_config,
        num_tokens=len(tokens),
        slot_mapping=dict.fromkeys(layer_names, tokens.slots),
        skip_compiled=not compiled,
    ):
        # Otherwise mixture-of-experts layers are told apart by counting calls per context (vLLM
        # forward_context.py), and a pass over part of the layers would pick wrong experts.
        get_forward_context().all_moe_layers = None
        yield


class RowBuilder:
    """Builds attention metadata for the pass with builders of its own.

    The runner's builders must not be called here: the main batch's metadata exists already, and on
    CUDA building again overwrites buffers that the main step is about to replay.
    """

    def __init__(
        self, vllm_config: VllmConfig, layer_names: list[str], kv_cache_spec: Any, backend: Any
    ) -> None:
        self.vllm_config = vllm_config
        self.layer_names = layer_names
        device = torch.device(vllm_config.device_config.device)
        self._builder = backend.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device)

    @contextmanager
    def forward_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, compiled: bool = False
    ) -> Iterator[None]:
        """Forward context in which the model's attention layers compute these tokens.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`.
            compiled: whether the model may run as vLLM has compiled it, or does so eagerly.
        """
        metadata = self._builder.build(0, self._common_metadata(tokens, block_tables))
        with pass_context(self.vllm_config, self.layer_names, metadata, tokens, compiled):
            yield

    @staticmethod
    def _common_metadata(tokens: TokenTable, block_tables: torch.Tensor) -> CommonAttentionMetadata:
        count = len(tokens)
        starts = row_starts(tokens).nonzero().flatten()
        bounds = torch.cat([starts, starts.new_tensor([count])])
        lengths = bounds[1:] - bounds[:-1]
        query_start_loc = bounds.to(torch.int32)
        seq_lens = (tokens.positions[bounds[1:] - 1] + 1).to(torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc.cpu(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.cpu(),
            num_reqs=starts.numel(),
            num_actual_tokens=count,
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_tables[tokens.request[starts]].contiguous(),
            slot_mapping=tokens.slots,
            causal=True,
            positions=tokens.positions,
        )
