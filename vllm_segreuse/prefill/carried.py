# SPDX-License-Identifier: Apache-2.0
"""What a new context changes of a token's key and value it changes of its neighbours' in much the
same way.

So reused tokens that are not recomputed take part in the changes of the nearest recomputed tokens
of their segment, in front of them and behind, layer by layer, before anything attends to them: the
tokens that are recomputed read neighbours that are nearer to what they would be, and so does the
question. The share of a change fades with the distance, to a part that all tokens of a segment have
in common (docs/decisions/0032-changes-are-carried.md). Between a token and the next recomputed one
nothing is computed, so nobody has read a token before it takes part: a pass in chunks comes to the
same as one at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from vllm_segreuse.kernels.page_tokens import pick_tokens, write_tokens
from vllm_segreuse.kernels.pages import Part, indexable
from vllm_segreuse.kernels.reference import rotate
from vllm_segreuse.model import token_kv
from vllm_segreuse.prefill.attention import Watching
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.compared import CARRIED_TOKENS
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import Index, host_reads, upload


class Share(NamedTuple):
    """Of a token's change, what its neighbours take part in.

    Attributes:
        common: at any distance.
        near: what is added right beside it, and fades.
        reach: in how many tokens, to a third (1 / e).
    """

    common: float
    near: float
    reach: float

    def at(self, distances: torch.Tensor) -> torch.Tensor:
        """Of tokens so far away, float32."""
        return self.common + self.near * torch.exp(-distances.abs() / self.reach)


class KvShares(NamedTuple):
    """Of the change of a recomputed token, what its neighbours take part in."""

    keys: Share
    values: Share


FROM_THE_FRONT = KvShares(keys=Share(0.17, 0.18, 10.0), values=Share(0.09, 0.22, 5.0))
"""Of the nearest recomputed token in front."""
FROM_BEHIND = KvShares(keys=Share(0.17, 0.06, 8.0), values=Share(0.07, 0.11, 4.0))
"""Of the nearest one behind. Chosen on tuning seeds of two models, by divergence along the
answer: of twice as much, the first token is as near, and what an answer copies further off."""


def carries(layers: LayerRunner, batch: Batch) -> bool:
    """Whether changes of these plans are carried. Latent vectors are keys and values at once; and
    beside images, tokens turn by other numbers than their distance."""
    latent = any(map(token_kv.is_latent, layers.stack.attention))
    return not latent and batch.tokens.mrope_positions is None


class Nearest(NamedTuple):
    """Of some tokens, the nearest recomputed one of their segment on one side.

    Attributes:
        rows: which of the recomputed ones, int64 `[tokens]`; -1: there is none, or the token is
            recomputed itself.
        distances: from it, below 0 in front of it, int64 `[tokens]`; 0 where there is none.
    """

    rows: torch.Tensor
    distances: torch.Tensor


def nearest_computed(
    runs: torch.Tensor, tokens: torch.Tensor, computed: torch.Tensor
) -> tuple[Nearest, Nearest]:
    """In front of tokens, and behind.

    Args:
        runs: of each token of all, the number of its segment; -1: of none, int64.
        tokens: that may take part, ascending, int64 `[tokens]`.
        computed: the tokens that are recomputed, ascending, int64 `[computed]`, at least one.
    """
    behind = torch.searchsorted(computed, tokens, right=True)
    is_computed = computed[(behind - 1).clamp_min(0)] == tokens
    found = []
    for rows in (behind - 1, behind):
        there = computed[rows.clamp(0, len(computed) - 1)]
        is_there = (rows >= 0) & (rows < len(computed)) & (runs[tokens] == runs[there])
        is_there &= ~is_computed
        distances = torch.where(is_there, tokens - there, 0)
        found.append(Nearest(torch.where(is_there, rows, -1), distances))
    return found[0], found[1]


class CarriedChanges(Watching):
    """Changes keys and values of reused tokens while others of their segments are recomputed.

    By the time a layer attends to a chunk, its keys and values are written, and what stood there
    before was read while the layer before attended. The last layer's output is nobody's input, so
    it is left.

    Args:
        layers: of the model.
        batch: the plans; tokens that may be chosen, and are not computed, take part.
        computed: what is about to be recomputed, ascending.
    """

    def __init__(self, layers: LayerRunner, batch: Batch, computed: Index) -> None:
        self._layers = layers.known[:-1]
        super().__init__([layer.attention for layer in self._layers])
        runs = batch.runs_of_candidates
        device = computed.device.device
        where = upload(np.flatnonzero(runs >= 0), device)
        both = nearest_computed(upload(runs, device), where, computed.device)
        self._sides = list(zip(both, (FROM_THE_FRONT, FROM_BEHIND), strict=True))
        everything, tables = batch.everything.device, {layer.table for layer in self._layers}
        slots = {it: batch.slots(everything, it) for it in tables}
        self._computed = {table: its[computed.device] for table, its in slots.items()}
        self._slots = {table: its[where] for table, its in slots.items()}
        self._longest = int(np.bincount(runs[runs >= 0], minlength=1).max())
        self._turning_alike = layers.turning_alike
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._device = device
        self._first = self._held = self._read(0, slice(None))
        self._chunk, self._taking = slice(0, 0), list[_Taking]()

    @contextmanager
    def of(self, layer: torch.nn.Module, query: torch.Tensor) -> Iterator[None]:
        """Attention of a chunk at a layer, whose changes are carried before."""
        found = self.chunk_of(layer, len(query))
        if found is None:
            yield
            return
        number, rows = found
        if number == 0:
            self._chunk = rows
            self._taking = [it for side in self._sides for it in self._taking_in(rows, *side)]
            self._held = [part[rows] for part in self._first]
        self._carry(number)
        if number + 1 < len(self._layers):
            self._held = self._read(number + 1, rows)
        yield

    def _taking_in(self, chunk: slice, nearest: Nearest, shares: KvShares) -> Iterator[_Taking]:
        """Who takes part in the changes of these recomputed tokens, as many at once as there is
        memory for. A GPU's host would have to wait to know who that is: there all tokens do, most
        of them in no change."""
        takes = (nearest.rows >= chunk.start) & (nearest.rows < chunk.stop)
        tokens = torch.arange(len(takes), device=self._device)
        if host_reads(self._device):
            tokens = tokens[takes]
        for part in tokens.split(CARRIED_TOKENS):
            distances = nearest.distances[part]
            yield _Taking(
                {table: slots[part] for table, slots in self._slots.items()},
                (nearest.rows[part] - chunk.start).clamp(0, chunk.stop - chunk.start - 1),
                distances + self._longest - 1,
                [share.at(distances)[:, None, None] for share in shares],
                takes[part, None, None],
            )

    def _carry(self, number: int) -> None:
        """Have tokens take part in the changes of this chunk at a layer."""
        layer = self._layers[number]
        # Both as they are stored: what has not changed must not differ by its rounding.
        stored = self._read(number, self._chunk)
        for i, part in enumerate(layer.parts):
            change = stored[i].float() - self._held[i].float()
            for taking in self._taking:
                taken = change[taking.rows] * taking.shares[i]
                if part.rotation is not None:
                    cos, sin = self._turns(number)
                    turns = cos[taking.distances], sin[taking.distances]
                    taken = rotate(taken, part.rotation, *turns)
                _add(layer.pages, part, taking.slots[layer.table], taken, taking.takes)

    def _read(self, number: int, chunk: slice) -> list[torch.Tensor]:
        """Keys and values of a chunk's recomputed tokens at a layer."""
        layer = self._layers[number]
        slots = self._computed[layer.table][chunk]
        return [pick_tokens(layer.pages, part.strides, slots) for part in layer.parts]

    def _turns(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much changes of a layer's keys turn on their way, from the farthest token in front
        to the farthest behind: cosine and sine `[2 * longest - 1, pairs]`."""
        number = self._turning_alike[number]
        if number not in self._tables:
            rope = self._layers[number].rope
            assert rope is not None
            distances = torch.arange(1 - self._longest, self._longest, device=self._device)
            self._tables[number] = rope.tables(distances)
        return self._tables[number]


class _Taking(NamedTuple):
    """Of a chunk, the tokens that take part in its changes from one side.

    Attributes:
        slots: of the tokens, int64 `[takers]`, by block table.
        rows: of the chunk's tokens, int64 `[takers]`.
        distances: rows of the tables of turns, int64 `[takers]`.
        shares: of keys and of values, float32 `[takers, 1, 1]` each.
        takes: bool `[takers, 1, 1]`: whether any part at all.
    """

    slots: dict[int, torch.Tensor]
    rows: torch.Tensor
    distances: torch.Tensor
    shares: list[torch.Tensor]
    takes: torch.Tensor


def _add(
    pages: torch.Tensor, part: Part, slots: torch.Tensor, more: torch.Tensor, takes: torch.Tensor
) -> None:
    """Add to tokens that take part, in float32, rounded once; fp8 saturates."""
    held = pick_tokens(pages, part.strides, slots)
    sums = held.float() + more
    if pages.dtype.itemsize == 1:
        largest = torch.finfo(pages.dtype).max
        sums = sums.clamp(-largest, largest)
    kept = torch.where(takes, indexable(sums.to(pages.dtype)), indexable(held))
    write_tokens(pages, part.strides, slots, kept.view(pages.dtype))
