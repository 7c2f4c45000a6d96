# SPDX-License-Identifier: Apache-2.0
"""Align: copy donor KV to its new slots, keys rotated by the position difference, values as they
are.

All plans of a step are aligned together, layer by layer; in a layer every source is read before any
destination is written, so overlapping sources and destinations are safe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_segreuse.cache.plan import ReusePlan
from vllm_segreuse.kernels.pages import PageLayout, flat_pages
from vllm_segreuse.prefill.rope import DeltaRope


@dataclass(frozen=True)
class TokenCopies:
    """Token by token: `source_slots[i]` to `target_slots[i]`, `deltas[i]` positions on."""

    source_slots: torch.Tensor
    target_slots: torch.Tensor
    deltas: torch.Tensor

    def __len__(self) -> int:
        return self.source_slots.numel()


def token_copies(
    plans: list[ReusePlan], block_size: int, device: torch.device, skip_always: bool
) -> TokenCopies:
    """The copies of all plans, one entry per token.

    Args:
        skip_always: leave out tokens that are computed at every layer anyway.
    """
    sources, targets, deltas = [], [], []
    for plan in plans:
        destination, length, block, offset, position = plan.pieces.astype(np.int64).T
        first = np.cumsum(length) - length
        within = np.arange(int(length.sum())) - np.repeat(first, length)
        to = np.repeat(destination, length) + within
        source = np.repeat(block * block_size + offset, length) + within
        delta = np.repeat(destination - position, length)
        if skip_always:
            keep = ~plan.recipe.always[to - plan.start]
            to, source, delta = to[keep], source[keep], delta[keep]
        blocks = plan.block_ids.astype(np.int64)
        sources.append(source)
        targets.append(blocks[to // block_size] * block_size + to % block_size)
        deltas.append(delta)
    return TokenCopies(
        *(torch.from_numpy(np.concatenate(part)).to(device) for part in (sources, targets, deltas))
    )


class Aligner:
    """Copies and rotates KV for the layers of a model.

    Args:
        attention: vLLM `Attention` layers, in layer order, KV caches bound.
        layouts: proven page layout of each.
        ropes: rotation of each; None where keys carry no position (NoPE).
        block_size: tokens per page.
    """

    def __init__(
        self,
        attention: list[torch.nn.Module],
        layouts: list[PageLayout],
        ropes: list[DeltaRope | None],
        block_size: int,
    ) -> None:
        self._attention = attention
        self._layouts = layouts
        self._ropes = ropes
        self._block_size = block_size

    def align(self, copies: TokenCopies, first_layer: int = 0) -> None:
        """Carry the copies out at layers `first_layer` and later."""
        if not len(copies):
            return
        # Whole pages are gathered (one memcpy each) and unpacked at once; picking single tokens out
        # of tiled pages would be a strided read per element.
        blocks, page_of = torch.unique(copies.source_slots // self._block_size, return_inverse=True)
        rows = page_of * self._block_size + copies.source_slots % self._block_size
        tables: list[tuple[DeltaRope, tuple[torch.Tensor, torch.Tensor]]] = []
        for index in range(first_layer, len(self._attention)):
            layer, layout, rope = self._attention[index], self._layouts[index], self._ropes[index]
            pages = flat_pages(layer.kv_cache)[blocks]
            keys = layout.keys.tokens(pages)[rows]
            values = layout.values.tokens(pages)[rows]
            if rope is not None:
                keys = rope.rotate(keys, *_shared_tables(tables, rope, copies.deltas))
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, copies.target_slots)

    def read_keys(self, layer_index: int, block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Keys of positions `[0, num_tokens)` of a block table: `[num_tokens, heads, size]`."""
        used = -(-num_tokens // self._block_size)
        pages = flat_pages(self._attention[layer_index].kv_cache)[block_ids[:used].long()]
        return self._layouts[layer_index].keys.tokens(pages)[:num_tokens]


def _shared_tables(
    tables: list[tuple[DeltaRope, tuple[torch.Tensor, torch.Tensor]]],
    rope: DeltaRope,
    deltas: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, computed once for all layers that rotate alike."""
    for known, table in tables:
        if known.same_as(rope):
            return table
    table = rope.tables(deltas)
    tables.append((rope, table))
    return table
