# SPDX-License-Identifier: Apache-2.0
"""How far up a token of similar text may be moved, by how much of its left context is equal.

    donor       ... a b c | d e f g h        equal from d on
    prompt      ... x y z | d e f g h        context of d: 0, of e: 1, of h: 4
    {8: 1, all: 4}                           d is computed, e to g enter at layer 8, h is moved

A table `W_exact` of layers gives the equal tokens that each takes. The KV below a layer depends on
the left context by way of the layers below it only, so deeper layers take no fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np

from segreuse_extras.similar.options import ALL, FULL_PREFIX
from vllm_segreuse.cache.assembly import DESTINATION, LENGTH, OFFSET, POSITION
from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.cache.links import Nodes
from vllm_segreuse.cache.rolling_hash import TokenArray
from vllm_segreuse.plan import ALL_LAYERS, BoolArray, IntArray, Pieces

EVERYTHING = np.iinfo(np.int32).max
"""Context of a token in front of which all is equal, and nothing else."""


class Depths:
    """A table of contexts by layer.

    Args:
        contexts: int32 `[n]`, ascending: equal tokens that it takes.
        layers: int32 `[n]`, ascending: how many layers a token is then moved at.
    """

    def __init__(self, contexts: IntArray, layers: IntArray) -> None:
        self._contexts, self._layers = contexts, layers

    @classmethod
    def of(cls, table: Mapping[str, int | str]) -> Self:
        """As `SimilarityOptions.w_exact`."""
        contexts = [EVERYTHING if it == FULL_PREFIX else int(it) for it in table.values()]
        layers = [ALL_LAYERS if it == ALL else int(it) for it in table]
        return cls(np.array(contexts, np.int32), np.array(layers, np.int32))

    def without_cuts(self) -> Depths:
        """For programs that cannot enter between layers: at all of them, or at none."""
        whole = self._layers == ALL_LAYERS
        return Depths(self._contexts[whole], self._layers[whole])

    @property
    def reach(self) -> tuple[int, bool]:
        """Most tokens that any layer asks for; and whether one asks for everything."""
        finite = self._contexts[self._contexts < EVERYTHING]
        return int(finite.max(initial=0)), finite.size < self._contexts.size

    def split(self, table: IntArray, begins: BoolArray, contexts: IntArray) -> Pieces:
        """Pieces of similar text, each of whose tokens goes as deep as it may; what may not be
        moved at all is left out.

        Args:
            table, begins: `[n, 5]` and `[n]`, see `Pieces.from_table`.
            contexts: int32 `[n]`, equal tokens in front of each piece.
        """
        lengths = table[:, LENGTH]
        piece = np.repeat(np.arange(len(table)), lengths)
        within = np.arange(piece.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        context = contexts[piece].astype(np.int64) + within
        step = np.searchsorted(self._contexts, context, side="right")
        depth = np.concatenate([[0], self._layers])[step]
        first = np.ones(piece.size, np.bool_)
        first[1:] = (piece[1:] != piece[:-1]) | (depth[1:] != depth[:-1])
        where = np.flatnonzero(first)
        rows = table[piece[where]].copy()
        for column in (DESTINATION, OFFSET, POSITION):
            rows[:, column] += within[where].astype(np.int32)
        rows[:, LENGTH] = np.diff(np.append(where, piece.size))
        kept = depth[where] > 0
        return Pieces.from_table(
            rows[kept],
            is_similar=True,
            layers=depth[where][kept],
            begins=(begins[piece[where]] & (within[where] == 0))[kept],
        )


@kernel
def left_contexts(
    nodes: Nodes,
    block_tokens: TokenArray,
    tokens: TokenArray,
    table: IntArray,
    entries: IntArray,
    most: int,
    everything: bool,
) -> IntArray:
    """Tokens in front of each piece that are equal in its donor's own sequence, one by one.

    Args:
        tokens: int32, of the prompt.
        table: int32 `[n, 5]`, see `Pieces.from_table`.
        entries: int32 `[n]`, of the donor blocks.
        most: so many are compared.
        everything: whether a donor that begins where the prompt does is compared as a whole.

    Returns:
        int32 `[n]`; `EVERYTHING` where the donor's whole left context is that of the prompt.
    """
    size = block_tokens.shape[1]
    found = np.zeros(table.shape[0], np.int32)
    for row in range(table.shape[0]):
        entry, offset, at = entries[row], table[row, OFFSET], table[row, DESTINATION]
        begins_alike = table[row, POSITION] == at
        limit = at if everything and begins_alike else min(at, most)
        count = 0
        while count < limit and entry >= 0:
            if offset == 0:
                entry, offset = nodes[entry].parent, size
                continue
            offset -= 1
            if block_tokens[nodes[entry].block, offset] != tokens[at - count - 1]:
                break
            count += 1
        found[row] = EVERYTHING if count == at and begins_alike else count
    return found
