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
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_segreuse.compat.metadata_builder import private_builder
from vllm_segreuse.prefill.tokens import TokenTable, row_starts, upload


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
    """Builds attention metadata for the pass with a builder of its own.

    Args:
        backend: vLLM's attention backend of the layers.
        max_rows: most rows of one pass.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        layer_names: list[str],
        kv_cache_spec: Any,
        backend: Any,
        max_rows: int,
    ) -> None:
        self.vllm_config = vllm_config
        self.layer_names = layer_names
        self._max_rows = max_rows
        device = torch.device(vllm_config.device_config.device)
        self._builder = private_builder(
            backend, kv_cache_spec, layer_names, vllm_config, max_rows, device
        )

    @contextmanager
    def forward_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, compiled: bool = False
    ) -> Iterator[None]:
        """Forward context in which the model's attention layers compute these tokens.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`.
            compiled: whether the model may run as vLLM has compiled it, or does so eagerly.

        Raises:
            ValueError: more rows than the builder has room for.
        """
        common = common_metadata(tokens, block_tables)
        if common.num_reqs > self._max_rows:
            raise ValueError(
                f"{len(tokens)} active tokens are {common.num_reqs} runs; the pass has room for "
                f"{self._max_rows}"
            )
        metadata = self._builder.build(0, common)
        with pass_context(self.vllm_config, self.layer_names, metadata, tokens, compiled):
            yield


def common_metadata(tokens: TokenTable, block_tables: torch.Tensor) -> CommonAttentionMetadata:
    """What every backend's builder starts from, laid out on the host."""
    device = tokens.positions.device
    positions, request = tokens.read_host()
    starts = np.flatnonzero(row_starts(tokens))
    bounds = np.append(starts, len(tokens)).astype(np.int32)
    seq_lens = (positions[bounds[1:] - 1] + 1).astype(np.int32)
    return CommonAttentionMetadata(
        query_start_loc=upload(bounds, device),
        query_start_loc_cpu=torch.from_numpy(bounds),
        seq_lens=upload(seq_lens, device),
        seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens),
        num_reqs=len(starts),
        num_actual_tokens=len(tokens),
        max_query_len=int(np.diff(bounds).max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_tables[upload(request[starts], device)].contiguous(),
        slot_mapping=tokens.slots,
        causal=True,
        positions=tokens.positions,
    )
