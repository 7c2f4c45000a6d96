# SPDX-License-Identifier: Apache-2.0
"""What the block pool reports to those who keep something by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class NamedBlocks(NamedTuple):
    """Consecutive full blocks of a request that vLLM has just named.

    Attributes:
        request_id: whose blocks they are.
        first: index of the first of them among the request's blocks.
        block_ids: their ids, in order.
        parent: id of the block before them; -1: they are the first.
        token_ids: all tokens of the request.
    """

    request_id: str
    first: int
    block_ids: list[int]
    parent: int
    token_ids: Sequence[int]


class BlockListener:
    """Override what is of interest. Called in the scheduler's thread, one listener after the other;
    no error may leave it.

    The content of an evicted block stays until the next step overwrites it.
    """

    def named(self, blocks: NamedBlocks) -> None:
        """Blocks of a request with extra keys got their names; their KV may not be there before the
        next step."""

    def evicting(self, block_ids: Sequence[int]) -> None:
        """vLLM is about to take these blocks, in this order, for other tokens. They have their
        names and their content still; those that have names lose them next (`evicted`)."""

    def evicted(self, block_ids: Sequence[int]) -> None:
        """Blocks lost their names, in this order."""

    def starving(self, request_id: str) -> None:
        """No request has blocks, and this one has no room: release what is held for others."""

    def resetting(self) -> None:
        """All names are about to be removed, which fails while anybody holds a block."""

    def reset(self) -> None:
        """All names were removed."""
