# SPDX-License-Identifier: Apache-2.0
"""What a new context changes of a token's key and value it changes of its neighbours' in much the
same way.

So reused tokens that are not recomputed take part in the change of the nearest recomputed token in
front of them, layer by layer, before anything attends to them: the tokens that are recomputed read
neighbours that are nearer to what they would be, and so does the question. The share of the change
fades with the distance, to a part that all tokens of a segment have in common
(docs/decisions/0032-changes-are-carried.md). Only tokens behind take part: these are read by later
tokens only, so chunks of a pass need nothing of later chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from vllm_segreuse.kernels.page_tokens import pick_tokens
from vllm_segreuse.kernels.pages import Carried, Share
from vllm_segreuse.model import token_kv
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.prefill.attention import Watching
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import Index, upload

KEYS, VALUES = Share(0.4, 0.4, 6.0), Share(0.25, 0.4, 3.0)
"""Chosen on tuning seeds, near the covariance of such changes in Qwen2.5-Coder 0.5B."""


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
        device = computed.device.device
        runs = batch.runs_of_candidates
        where = upload(np.flatnonzero(runs >= 0), device)
        before = (torch.searchsorted(computed.device, where, right=True) - 1).clamp_min(0)
        distance = where - computed.device[before]
        run = upload(runs, device)
        takes_part = (run[where] == run[computed.device[before]]) & (distance > 0)
        self._before = torch.where(takes_part, before, -1)
        self._longest = int(np.bincount(runs[runs >= 0], minlength=1).max())
        self._distances = distance.clamp(0, max(0, self._longest - 1))
        self._shares = torch.stack([share.at(self._distances) for share in (KEYS, VALUES)])
        self._slots = batch.tokens.slots[where]
        self._computed = batch.tokens.slots[computed.device]
        self._turning_alike = layers.turning_alike
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_chunk: dict[int, Carried] = {}
        self._first = self._moved = _read(self._layers[0], self._computed)

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
        known.kernels.carry(known.pages, known.parts, self._moved, self._carried(number, chunk))
        if number + 1 < len(self._layers):
            self._moved = _read(self._layers[number + 1], self._computed[chunk])
        yield

    def _carried(self, number: int, chunk: slice) -> Carried:
        """Who takes part in the changes of a chunk's tokens: the same at layers that turn alike."""
        number = self._turning_alike[number]
        if number not in self._of_chunk:
            mine = (self._before >= chunk.start) & (self._before < chunk.stop)
            self._of_chunk[number] = Carried(
                self._computed[chunk],
                self._slots,
                torch.where(mine, self._before - chunk.start, -1),
                self._distances,
                self._shares,
                *self._turns(number),
            )
        return self._of_chunk[number]

    def _turns(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much changes of a layer's keys turn on their way, cosine and sine
        `[distances, pairs]`."""
        if number not in self._tables:
            rope, device = self._layers[number].rope, self._slots.device
            none = torch.zeros(self._longest, 0, device=device)
            distances = torch.arange(self._longest, device=device)
            self._tables[number] = (none, none) if rope is None else rope.tables(distances)
        return self._tables[number]


def _read(layer: LayerKv, slots: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values at these slots."""
    return [pick_tokens(layer.pages, part.strides, slots) for part in layer.parts]
