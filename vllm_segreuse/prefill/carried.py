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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_segreuse.kernels.page_tokens import pick_tokens
from vllm_segreuse.kernels.pages import Carried, Share
from vllm_segreuse.model import token_kv
from vllm_segreuse.prefill.attention import Watching
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import Index, upload


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
    """Whether changes of these plans are carried: at every layer, or at none if one has no kernel
    for it. Latent vectors are keys and values at once; and beside images, tokens turn by other
    numbers than their distance."""
    latent = any(map(token_kv.is_latent, layers.stack.attention))
    able = all(layer.kernels.carry is not None for layer in layers.known)
    return able and not latent and batch.tokens.mrope_positions is None


class CarriedChanges(Watching):
    """Changes keys and values of reused tokens while others of their segments are recomputed.

    By the time a layer attends to a chunk, its keys and values are written, and what stood there
    before was read while the layer before attended. What leaves the model's last layer is nobody's
    input, so that is left.

    Args:
        layers: of the model.
        batch: the plans; tokens that may be chosen, and are not computed, take part.
        computed: what is about to be recomputed, ascending.
    """

    def __init__(self, layers: LayerRunner, batch: Batch, computed: Index) -> None:
        self._layers = layers.known[: len(layers.known) - layers.stage.is_last]
        super().__init__([layer.attention for layer in self._layers])
        device = computed.device.device
        runs = batch.runs_of_candidates
        where = upload(np.flatnonzero(runs >= 0), device)
        self._longest = int(np.bincount(runs[runs >= 0], minlength=1).max())
        behind = torch.searchsorted(computed.device, where, right=True)
        run = upload(runs, device)
        is_computed = computed.device[(behind - 1).clamp_min(0)] == where
        self._sides = [
            self._side(where, computed.device, nearest, is_computed, run, shares)
            for nearest, shares in ((behind - 1, FROM_THE_FRONT), (behind, FROM_BEHIND))
        ]
        everything, tables = batch.everything.device, {layer.table for layer in self._layers}
        slots = {it: batch.slots(everything, it) for it in tables}
        self._slots = {table: its[where] for table, its in slots.items()}
        self._computed = {table: its[computed.device] for table, its in slots.items()}
        self._device = device
        self._turning_alike = layers.turning_alike
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_chunk: dict[tuple[int, int], list[Carried]] = {}
        # The last of several pipeline stages may have that layer alone.
        self._first = self._moved = self._read(0, slice(None)) if self._layers else []

    def _side(
        self,
        where: torch.Tensor,
        computed: torch.Tensor,
        nearest: torch.Tensor,
        is_computed: torch.Tensor,
        run: torch.Tensor,
        shares: KvShares,
    ) -> _Side:
        """Of all tokens `where`, the nearest recomputed one on one side, if it is of their run, and
        they are not recomputed themselves."""
        there = computed[nearest.clamp(0, len(computed) - 1)]
        is_there = (nearest >= 0) & (nearest < len(computed)) & (run[where] == run[there])
        is_there &= ~is_computed
        distance = torch.where(is_there, where - there, 0)
        return _Side(
            rows=torch.where(is_there, nearest, -1),
            distances=distance + self._longest - 1,
            shares=torch.stack([share.at(distance.abs()) for share in shares]),
        )

    @contextmanager
    def of(self, layer: torch.nn.Module, query: torch.Tensor) -> Iterator[None]:
        """Attention of a chunk at a layer, whose changes are carried before."""
        found = self.chunk_of(layer, len(query))
        if found is None:
            yield
            return
        number, chunk = found
        if number == 0:
            self._of_chunk.clear()
            self._moved = [part[chunk] for part in self._first]
        known = self._layers[number]
        assert known.kernels.carry is not None  # or `carries` had said no
        # Both as they are stored: what has not changed must not differ by its rounding.
        for carried in self._carried(number, chunk):
            known.kernels.carry(known.pages, known.parts, self._moved, carried)
        if number + 1 < len(self._layers):
            self._moved = self._read(number + 1, chunk)
        yield

    def _carried(self, number: int, chunk: slice) -> list[Carried]:
        """Who takes part in the changes of a chunk's tokens: the same at layers that turn alike."""
        table, number = self._layers[number].table, self._turning_alike[number]
        if (table, number) not in self._of_chunk:
            self._of_chunk[table, number] = [
                Carried(
                    self._computed[table][chunk],
                    self._slots[table],
                    side.rows_in(chunk),
                    side.distances,
                    side.shares,
                    *self._turns(number),
                )
                for side in self._sides
            ]
        return self._of_chunk[table, number]

    def _read(self, number: int, chunk: slice) -> list[torch.Tensor]:
        """Keys and values of a chunk's recomputed tokens at a layer."""
        layer = self._layers[number]
        slots = self._computed[layer.table][chunk]
        return [pick_tokens(layer.pages, part.strides, slots) for part in layer.parts]

    def _turns(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much changes of a layer's keys turn on their way, from the farthest token in front
        to the farthest behind: cosine and sine `[2 * longest - 1, pairs]`."""
        if number not in self._tables:
            rope, device = self._layers[number].rope, self._device
            distances = torch.arange(1 - self._longest, self._longest, device=device)
            none = torch.zeros(len(distances), 0, device=device)
            self._tables[number] = (none, none) if rope is None else rope.tables(distances)
        return self._tables[number]


@dataclass(frozen=True)
class _Side:
    """The nearest recomputed tokens on one side.

    Attributes:
        rows: int64 `[tokens]`; -1: there is none.
        distances: as `Carried` has them, int64 `[tokens]`.
        shares: of the change of keys and of values, float32 `[2, tokens]`.
    """

    rows: torch.Tensor
    distances: torch.Tensor
    shares: torch.Tensor

    def rows_in(self, chunk: slice) -> torch.Tensor:
        """Of a chunk's tokens, counted from its first."""
        inside = (self.rows >= chunk.start) & (self.rows < chunk.stop)
        return torch.where(inside, self.rows - chunk.start, -1)
