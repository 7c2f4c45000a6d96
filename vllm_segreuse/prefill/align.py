# SPDX-License-Identifier: Apache-2.0
"""Align: copy donor KV to its new slots, keys rotated by the position difference, values as they
are.

All plans of a step are aligned together. In a layer every source is read before any destination is
written where they share a page, so overlapping sources and destinations are safe. What comes from
rows of the host region is written behind all that comes from pages of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.pages import Moves
from vllm_segreuse.model.cells import StoredPage
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.plan import ALL_LAYERS, Fate, ReusePlan, Tier
from vllm_segreuse.prefill.mover import Mover
from vllm_segreuse.prefill.tokens import upload


@dataclass(frozen=True)
class TokenCopies:
    """Token by token: `source_slots[i]` to `target_slots[i]`, `deltas[i]` positions on; int64.

    Attributes:
        positions: of the tokens in their donor's sequence, as their model numbers them.
        stops: int32, the layers before this one; `ALL_LAYERS`: all.
        tiers: int8, `Tier` of the sources; those of the host's are slots of its rows.
    """

    source_slots: np.ndarray
    target_slots: np.ndarray
    deltas: np.ndarray
    positions: np.ndarray
    stops: np.ndarray
    tiers: np.ndarray

    @classmethod
    def at_all_layers(
        cls, source_slots: np.ndarray, target_slots: np.ndarray, deltas: np.ndarray
    ) -> TokenCopies:
        """Copies within the cache of which nothing else matters: no state goes with them."""
        stops = np.full(len(deltas), ALL_LAYERS, np.int32)
        tiers = np.full(len(deltas), Tier.GPU, np.int8)
        return cls(source_slots, target_slots, deltas, np.zeros_like(deltas), stops, tiers)

    def __len__(self) -> int:
        return len(self.source_slots)

    def take(self, which: np.ndarray) -> TokenCopies:
        """Some of them, by a mask."""
        return TokenCopies(*(getattr(self, column.name)[which] for column in fields(self)))


def token_copies(
    plans: list[ReusePlan], block_size: int, skip_always: bool, table: int = 0
) -> TokenCopies:
    """The copies of all plans, one entry per token.

    Args:
        skip_always: omit tokens that are computed at every layer anyway, and not compared.
        table: which of a request's block tables.
    """
    columns: list[tuple[np.ndarray, ...]] = []
    for plan in plans:
        pieces, length = plan.pieces, plan.pieces.length
        first = np.cumsum(length) - length
        within = np.arange(pieces.num_tokens) - np.repeat(first, length)
        to = np.repeat(pieces.destination, length) + within
        sources, targets = plan.sources_and_table(table)
        slot = sources.astype(np.int64) * block_size + pieces.offset
        source = np.repeat(slot, length) + within
        delta = np.repeat(pieces.turn.astype(np.int64), length)
        stop = np.full(len(to), ALL_LAYERS, np.int32)
        for number, cut in enumerate(plan.recipe.program.cuts):
            stop[plan.recipe.fates[to - plan.start] == Fate.ENTERS + number] = cut
        target = targets.astype(np.int64)[to // block_size] * block_size + to % block_size
        tier = np.repeat(pieces.source, length)
        at = to if plan.mrope_positions is None else plan.mrope_positions[0, to - plan.start]
        columns.append((source, target, delta, at - delta, stop, tier))
        if skip_always:
            keep = plan.moved[to - plan.start]
            columns[-1] = tuple(column[keep] for column in columns[-1])
    return TokenCopies(*(np.concatenate(column) for column in zip(*columns, strict=True)))


class BlockCopies(NamedTuple):
    """Whole blocks that are copied as they are.

    Attributes:
        sources: int64 `[n]`, blocks of the cache, or rows of the host region.
        targets: int64 `[n]`, blocks of the cache.
        tiers: int8 `[n]`, `Tier` of each source.
    """

    sources: np.ndarray
    targets: np.ndarray
    tiers: np.ndarray


def block_copies(plans: list[ReusePlan], block_size: int) -> BlockCopies:
    """What all plans restore."""
    columns = [
        (pieces.block, plan.block_ids[pieces.destination // block_size], pieces.source)
        for plan in plans
        if plan.restoration is not None
        for pieces in [plan.restoration.pieces]
    ]
    if not columns:
        return BlockCopies(*np.empty((3, 0), np.int64))
    sources, targets, tiers = (np.concatenate(column) for column in zip(*columns, strict=True))
    return BlockCopies(sources.astype(np.int64), targets.astype(np.int64), tiers)


class Aligner:
    """Copies and rotates KV for the layers of a model.

    Args:
        layers: in order.
        codec: how the rows of the second tier are stored.
        host_rows: of the second tier; None: nothing is copied from there.

    Attributes:
        layers, codec, host_rows: as given.
    """

    def __init__(
        self, layers: list[LayerKv], codec: Codec = Codec.RAW, host_rows: Mover | None = None
    ) -> None:
        self.codec = codec
        self.host_rows = host_rows
        self.layers = layers
        self._block_size = layers[0].layout.keys.shape[1]
        self._groups: list[_Group] = []
        for index, layer in enumerate(layers):
            for group in self._groups:
                if layer.moves_like(group.first):
                    group.pages.append(layer.pages)
                    group.layers.append(index)
                    break
            else:
                self._groups.append(_Group(layer, [layer.pages], [index]))

    def reading(self, host_rows: Mover) -> Aligner:
        """One that also copies from rows of the second tier, as this one stores them."""
        return Aligner(self.layers, self.codec, host_rows)

    @property
    def num_tables(self) -> int:
        """Block tables of a request."""
        return 1 + max(layer.table for layer in self.layers)

    def align(self, copies: TokenCopies, first_layer: int = 0, table: int = 0) -> None:
        """Carry the copies out at layers `first_layer` and later, each up to where it stops.

        Args:
            table: which of a request's block tables they are in; other layers are left.

        Raises:
            RuntimeError: some are from the host, and there is no second tier.
        """
        from_host = copies.tiers == Tier.HOST
        self._align(copies.take(~from_host), first_layer, table=table)
        if from_host.any():
            self._align_rows(copies.take(from_host), first_layer)

    @property
    def device(self) -> torch.device:
        """That has the cache."""
        return self._groups[0].pages[0].device

    def restore(self, copies: BlockCopies) -> None:
        """Copy whole blocks to where they are computed otherwise, byte for byte.

        Raises:
            RuntimeError: some are from the host, and there is no second tier, or it has no exact
                records.
        """
        from_host = copies.tiers == Tier.HOST
        if not from_host.all():
            here = ~from_host
            self._copy_pages(None, copies.sources[here], copies.targets[here])
        if not from_host.any():
            return
        if self.codec is not Codec.RAW:
            raise RuntimeError(f"records of codec {self.codec} are not exact")
        rows, which = np.unique(copies.sources[from_host], return_inverse=True)
        targets = copies.targets[from_host]
        for loaded in self._mover().load(rows.astype(np.int32)):
            here = (which >= loaded.first) & (which < loaded.stop)
            self._copy_pages(loaded.pages, loaded.slots[which[here] - loaded.first], targets[here])

    def _copy_pages(
        self, pages: Sequence[torch.Tensor] | None, sources: np.ndarray, targets: np.ndarray
    ) -> None:
        """Whole pages of each layer to blocks of the cache; no target is a source.

        Args:
            pages: of each layer; None: those of the cache.
        """
        read, written = (upload(each.astype(np.int64), self.device) for each in (sources, targets))
        for group in self._groups:
            source = group.pages if pages is None else [pages[index] for index in group.layers]
            group.first.kernels.store(source, group.pages, read, written)

    def copy_blocks(
        self, to: Sequence[torch.Tensor], blocks: np.ndarray, rows: np.ndarray
    ) -> torch.Tensor | None:
        """Copy whole blocks to pages elsewhere, by the codec.

        Args:
            to: pages of each layer, on the same device, as `stored_pages` says.
            blocks, rows: `[n]`; no row twice.

        Returns:
            Which blocks the codec could store, bool `[n]`; None: all, byte for byte.
        """
        source, target = (upload(which.astype(np.int64), self.device) for which in (blocks, rows))
        encoded = None
        for group in self._groups:
            kernels, cells = group.first.kernels, [to[index] for index in group.layers]
            if self.codec is Codec.RAW:
                kernels.store(group.pages, cells, source, target)
            else:
                parts = group.first.parts
                found = kernels.encode(group.pages, parts, self.codec, source, cells, target)
                encoded = found if encoded is None else encoded & found
        return encoded

    def stored_pages(self) -> list[StoredPage]:
        """How a page of each layer is stored, in order."""
        found: dict[int, StoredPage] = {}
        for group in self._groups:
            shapes = (part.strides.shape for part in group.first.parts)
            page = StoredPage.of(group.pages[0], self.codec, *shapes)
            found |= dict.fromkeys(group.layers, page)
        return [found[index] for index in sorted(found)]

    def _align_rows(self, copies: TokenCopies, first_layer: int) -> None:
        """Copies from rows of the host region, as many at a time as the device can read."""
        row, token = np.divmod(copies.source_slots, self._block_size)
        rows, which = np.unique(row, return_inverse=True)
        for loaded in self._mover().load(rows.astype(np.int32)):
            here = (which >= loaded.first) & (which < loaded.stop)
            slots = loaded.slots[which[here] - loaded.first] * self._block_size + token[here]
            chunk = replace(copies.take(here), source_slots=slots)
            self._align(chunk, first_layer, loaded.pages)

    def _mover(self) -> Mover:
        if self.host_rows is None:
            raise RuntimeError("a plan copies from the host, and there is no second tier")
        return self.host_rows

    def _align(
        self,
        copies: TokenCopies,
        first_layer: int,
        rows: list[torch.Tensor] | None = None,
        table: int = 0,
    ) -> None:
        """Carry copies out from one tier.

        Args:
            rows: pages of each layer that sources are slots of; None: those of the cache.
            table: see `align`.
        """
        groups = [group for group in self._groups if group.first.table == table]
        stops = np.unique(copies.stops[copies.stops > first_layer]).tolist()
        for begin, end in pairwise([first_layer, *stops]):
            self._align_layers(groups, copies.take(copies.stops > begin), begin, end, rows)

    def _align_layers(
        self,
        groups: list[_Group],
        copies: TokenCopies,
        first_layer: int,
        stop_layer: int,
        rows: list[torch.Tensor] | None,
    ) -> None:
        """Carry the copies out at layers `[first_layer, stop_layer)` of some groups."""
        # A plan has few distinct differences: one per segment.
        distinct, angles = np.unique(copies.deltas, return_inverse=True)
        device = self._groups[0].pages[0].device
        sources, targets, angles_of = (
            upload(array, device) for array in (copies.source_slots, copies.target_slots, angles)
        )
        overlapping = rows is None and self._overlap(copies)
        for group in groups:
            layers = [
                (index, pages)
                for index, pages in zip(group.layers, group.pages, strict=True)
                if first_layer <= index < stop_layer
            ]
            if layers:
                tables = group.tables(torch.from_numpy(distinct))
                cos, sin = (upload(table.numpy(), device) for table in tables)
                moves = Moves(sources, targets, angles_of, cos, sin, overlapping)
                pages = [pages for _, pages in layers]
                kernels, parts = group.first.kernels, group.first.parts
                read = None if rows is None else [rows[index] for index, _ in layers]
                if read is None:
                    kernels.align(pages, parts, moves)
                elif self.codec is Codec.RAW:
                    kernels.align(pages, parts, moves, sources=read)
                else:
                    kernels.decode(pages, parts, moves, read, self.codec)

    def _overlap(self, copies: TokenCopies) -> bool:
        """Whether a page is both read and written."""
        read, written = (
            slots // self._block_size for slots in (copies.source_slots, copies.target_slots)
        )
        is_read = np.zeros(max(read.max(), written.max()) + 1, dtype=np.bool_)
        is_read[read] = True
        return bool(is_read[written].any())


@dataclass
class _Group:
    """Layers that are aligned by one call of the kernel; the first stands for all."""

    first: LayerKv
    pages: list[torch.Tensor]
    layers: list[int]

    def tables(self, deltas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by delta; of no columns where nothing turns."""
        if self.first.rope is None:
            nothing = torch.zeros(len(deltas), 0, device=deltas.device)
            return nothing, nothing
        return self.first.rope.tables(deltas)
