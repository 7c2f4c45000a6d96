# SPDX-License-Identifier: Apache-2.0
"""Block tables of plans that are computed together, where layers of several KV cache groups have
one each.

They lie behind one another: with `n` requests, rows `[i * n, (i + 1) * n)` are table `i` of all of
them. So what knows of one table only, as without vLLM's hybrid KV cache manager, sees just that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_segreuse.prefill.tokens import TokenTable


@dataclass(frozen=True)
class BlockTables:
    """How they are laid out.

    Attributes:
        count: tables of a request.
        block_size: tokens per block, the same in all of them.
    """

    count: int
    block_size: int

    def of(self, block_tables: torch.Tensor, table: int) -> torch.Tensor:
        """One table of all requests, `[requests, blocks]`."""
        if self.count == 1:
            return block_tables
        requests = len(block_tables) // self.count
        return block_tables[table * requests : (table + 1) * requests]

    def slots(self, tokens: TokenTable, block_tables: torch.Tensor, table: int) -> torch.Tensor:
        """Where some tokens are written at layers of a table, int64 `[tokens]`.

        Args:
            tokens: with their slots in the first table.
            block_tables: of all tables.
        """
        if not table:
            return tokens.slots
        rows, size = self.of(block_tables, table), self.block_size
        blocks = rows[tokens.request, tokens.positions // size].long()
        return blocks * size + tokens.positions % size

    def tokens(self, tokens: TokenTable, block_tables: torch.Tensor, table: int) -> TokenTable:
        """Some tokens with their slots in a table."""
        return replace(tokens, slots=self.slots(tokens, block_tables, table)) if table else tokens
