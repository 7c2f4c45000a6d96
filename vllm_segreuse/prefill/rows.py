# SPDX-License-Identifier: Apache-2.0
"""Scattered query tokens as rows of the stock attention backend.

Each contiguous run of active positions becomes a row of its own: its queries, a sequence length
that ends with the run, and its request's block table. Keys and values are written to the cache
before they are read, so every backend's bottom-right-aligned causal mask is then exactly causal for
every query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_segreuse.compat.metadata_builder import build_rows, private_builder
from vllm_segreuse.kernels.dispatch import LONG_RUN
from vllm_segreuse.model.token_kv import is_latent
from vllm_segreuse.prefill.tables import BlockTables
from vllm_segreuse.prefill.tokens import TokenTable, row_starts, upload

MOST_DECODES = 256
"""Tokens that latent layers decode at once, or as many as vLLM itself does. Their backends split
each over many programs, whose partial results are held in float32."""


class Execution(NamedTuple):
    """How vLLM runs the model in a pass.

    Attributes:
        compiled: as it has compiled it, if it runs as a whole; else eagerly.
        graph_tokens: by the CUDA graphs of so many tokens, to which those of the pass are padded
            (`graphs.py`); 0: by none.
    """

    compiled: bool
    graph_tokens: int = 0


EAGER = Execution(compiled=False)


@contextmanager
def pass_context(
    vllm_config: VllmConfig,
    metadata: Mapping[str, Any],
    tokens: TokenTable,
    execution: Execution = EAGER,
    slots: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[None]:
    """vLLM's forward context for a pass over these tokens, with metadata by layer.

    Args:
        slots: of the tokens, by layer; None: those of the table that they have.
    """
    size = execution.graph_tokens
    written = dict.fromkeys(metadata, tokens.slots) if slots is None else dict(slots)
    if size:  # keys and values of the padding are written nowhere, as in vLLM's own steps
        padding = 0, size - len(tokens)
        padded = {id(it): torch.nn.functional.pad(it, padding, value=-1) for it in written.values()}
        written = {name: padded[id(it)] for name, it in written.items()}
    with set_forward_context(
        dict(metadata),
        vllm_config,
        num_tokens=size or len(tokens),
        slot_mapping=written,
        skip_compiled=not execution.compiled,
        cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE if size else CUDAGraphMode.NONE,
        batch_descriptor=BatchDescriptor(size) if size else None,
    ):
        # Otherwise mixture-of-experts layers are told apart by counting calls per context (vLLM
        # forward_context.py), and a pass over part of the layers would pick wrong experts.
        get_forward_context().all_moe_layers = None
        yield


class RowBuilder:
    """Builds attention metadata for the pass with builders of its own.

    Layers are grouped as vLLM's runner groups them (`AttentionGroupKey` in
    `v1/worker/gpu_model_runner.py`), so that what its kernels get is what they get from the runner:
    windows do not tell groups apart, backends take them from the layer.

    Latent layers (MLA) are given scattered tokens as vLLM's decodes, in rows of one token each: the
    way of prefills projects the context of every row up anew.

    Args:
        attention: vLLM's attention layers, by name.
        specs: vLLM's `KVCacheSpec` of each.
        max_rows: most rows of one pass.
        tables: how a request's block tables are laid out; None: it has one.
        table_of: which of them is a layer's; 0 where nothing is said.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        attention: Mapping[str, torch.nn.Module],
        specs: Mapping[str, Any],
        max_rows: int,
        tables: BlockTables | None = None,
        table_of: Mapping[str, int] | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self._tables = tables or BlockTables(1, 0)
        self._max_rows = max_rows
        device = torch.device(vllm_config.device_config.device)
        groups: dict[Any, list[str]] = {}
        for name, layer in attention.items():
            backend, table = layer.get_attn_backend().full_cls_name(), (table_of or {}).get(name, 0)
            groups.setdefault((table, backend, specs[name], layer.num_heads), []).append(name)
        self._builders = [
            (
                key[0],
                names,
                private_builder(
                    attention[names[0]].get_attn_backend(),
                    specs[names[0]],
                    names,
                    vllm_config,
                    max_rows,
                    device,
                ),
            )
            for key, names in groups.items()
        ]
        self._latent = any(map(is_latent, attention.values()))

    def most_tokens(self, tokens: TokenTable) -> int:
        """How many of some tokens a pass may compute at once."""
        if not self._decodes(tokens):
            return len(tokens)
        return max(MOST_DECODES, int(self.vllm_config.scheduler_config.max_num_seqs))

    def _decodes(self, tokens: TokenTable) -> bool:
        """Whether each token is a row, as vLLM's decodes are."""
        return self._latent and not has_long_runs(tokens, LONG_RUN)

    @contextmanager
    def forward_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, execution: Execution = EAGER
    ) -> Iterator[None]:
        """Forward context in which the model's attention layers compute these tokens.

        Args:
            tokens: the active tokens.
            block_tables: int32 `[requests, blocks]`; of all tables, one behind the other.
            execution: how the model runs.

        Raises:
            ValueError: more rows than the builders have room for.
        """
        metadata = self.metadata(tokens, block_tables)
        slots = None
        if self._tables.count > 1:
            by_table = self._by_table(tokens, block_tables)
            slots = {
                name: by_table[table].slots for table, names, _ in self._builders for name in names
            }
        with pass_context(self.vllm_config, metadata, tokens, execution, slots):
            yield

    def _by_table(self, tokens: TokenTable, block_tables: torch.Tensor) -> dict[int, TokenTable]:
        """The tokens as layers of each table see them."""
        tables = {table for table, _, _ in self._builders}
        return {it: self._tables.tokens(tokens, block_tables, it) for it in tables}

    def metadata(self, tokens: TokenTable, block_tables: torch.Tensor) -> dict[str, Any]:
        """Metadata of each layer's backend; arguments and errors as of `forward_context`."""
        decoded = self._decodes(tokens)
        common = {
            table: common_metadata(there, self._tables.of(block_tables, table), alone=decoded)
            for table, there in self._by_table(tokens, block_tables).items()
        }
        rows = next(iter(common.values())).num_reqs  # they are the same in all tables
        if rows > self._max_rows:
            raise ValueError(
                f"{len(tokens)} active tokens are {rows} rows; the pass has room for "
                f"{self._max_rows}"
            )
        return {
            name: metadata
            for table, names, builder in self._builders
            for metadata in [build_rows(builder, common[table], decoded)]
            for name in names
        }


def has_long_runs(tokens: TokenTable, long_run: int) -> bool:
    """Whether runs of neighbours have so many tokens on average.

    Where only the device knows the tokens, most were chosen one by one: asking would cost more than
    it could save.
    """
    return tokens.host is not None and len(tokens) >= long_run * int(row_starts(tokens).sum())


def common_metadata(
    tokens: TokenTable, block_tables: torch.Tensor, alone: bool = False
) -> CommonAttentionMetadata:
    """What every backend's builder starts from, laid out on the host.

    Args:
        tokens: the active tokens.
        block_tables: int32 `[requests, blocks]`.
        alone: each token is a row, else each run.
    """
    device = tokens.positions.device
    positions, request = tokens.read_host()
    starts = np.arange(len(tokens)) if alone else np.flatnonzero(row_starts(tokens))
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
