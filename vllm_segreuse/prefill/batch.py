# SPDX-License-Identifier: Apache-2.0
"""Plans that are computed together, as flat tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection

import numpy as np
import torch

from vllm_segreuse.kernels.pages import TiledStrides, indexable
from vllm_segreuse.plan import Fate, ReusePlan
from vllm_segreuse.plan.images import ROWS
from vllm_segreuse.prefill.tables import BlockTables
from vllm_segreuse.prefill.tokens import HostTokens, Index, TokenTable, upload

EVERY = slice(None)
"""All tokens of a batch."""


class Batch:
    """Tokens `[start, stop)` of plans with equal programs and the same adapter, as flat tensors.

    Behind them stands the suffix of each plan, which probes.

    Args:
        plans: at least one.
        block_size: tokens per block.
        device: where the KV cache is.
        chunk_work: most layer-tokens of a chunk, where others are to run between chunks.

    Attributes:
        program: of the plans, whose checks may differ.
        tokens: every token, by plan, then by position.
        always, probes: see `Recipe`; the suffixes are among them.
        suffix: of all plans, which goes no further than to the choice.
        lengths: tokens of each plan, with its suffix.
        bounds: first token of each plan, and the end.
        block_tables: int32 `[plans, blocks]`; of all tables, one behind the other (`tables.py`).
        lora_id: adapter of the plans.
        sound: bool `[plans]`, on the device: no score was NaN.
        drift: float64 `[plans]`, on the device; NaN where it is not measured.
        boundary_drifts: float64 `[segments]`, on the device: of the similar segments of each plan
            that tests them (`acceptance.py`).
        auxiliary: `[tokens, hidden]` of each layer whose input drafts are given; of tokens that
            the layers before it were run on.
    """

    def __init__(
        self,
        plans: list[ReusePlan],
        block_size: int,
        device: torch.device,
        chunk_work: int | None = None,
    ) -> None:
        self.plans = plans
        self.program = plans[0].recipe.program
        self.chunk_work = chunk_work
        self.lora_id = plans[0].lora_id
        self._layout = BlockTables(1 + len(plans[0].others), block_size)
        tables = _joined(plans)
        self.lengths = [plan.num_written for plan in plans]
        request = np.repeat(np.arange(len(plans)), self.lengths)
        positions = np.concatenate(
            [np.arange(p.start, p.start + n) for p, n in zip(plans, self.lengths, strict=True)]
        )
        slots = tables[request, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size

        ids = [part for plan in plans for part in (plan.token_ids, plan.suffix)]
        self.tokens = TokenTable(
            upload(np.concatenate(ids).astype(np.int64), device),
            upload(positions, device),
            upload(request, device),
            upload(slots, device),
            HostTokens(positions, request),
            self._numbers(positions, device),
        )
        self._device = device
        self._fates = np.concatenate(
            [
                part
                for plan in plans
                for part in (plan.recipe.fates, np.full(len(plan.suffix), Fate.PROBE, np.int8))
            ]
        )
        self.always = Index.known(np.flatnonzero(self._fates >= Fate.ALWAYS), device)
        self.probes = Index.known(np.flatnonzero(self._fates == Fate.PROBE), device)
        self.bounds = np.concatenate([[0], np.cumsum(self.lengths)])
        stops = np.array([plan.stop for plan in plans])
        self.suffix = Index.known(np.flatnonzero(positions >= stops[request]), device)
        self.block_tables = upload(tables, device)
        self.sound = torch.ones(len(plans), dtype=torch.bool, device=device)
        self.drift = torch.full((len(plans),), torch.nan, dtype=torch.float64, device=device)
        self.boundary_drifts = torch.zeros(0, dtype=torch.float64, device=device)
        self.auxiliary: dict[int, torch.Tensor] = {}

    def _numbers(self, positions: np.ndarray, device: torch.device) -> torch.Tensor | None:
        """Of all tokens, where a prompt has images; see `TokenTable`."""
        if all(plan.mrope_positions is None for plan in self.plans):
            return None
        numbers = np.repeat(positions[None].astype(np.int64), ROWS, axis=0)
        bounds = np.cumsum([0, *self.lengths])
        for plan, first, stop in zip(self.plans, bounds, bounds[1:], strict=False):
            if plan.mrope_positions is not None:
                numbers[:, first:stop] = plan.mrope_positions[:, : stop - first]
        return upload(numbers, device)

    @property
    def may_be_chosen(self) -> np.ndarray:
        """bool `[tokens]`, on the host: `Recipe.candidates`."""
        return self._fates == Fate.CANDIDATE

    @property
    def runs_of_candidates(self) -> np.ndarray:
        """int64 `[tokens]`, on the host: the same number for tokens of one segment that may be
        chosen and follow one another; -1 for all others."""
        begins = (~self.may_be_chosen).astype(np.int64)
        for plan, first in zip(self.plans, self.bounds[:-1], strict=True):
            begins[first] = 1
            begins[first + plan.pieces.segments(plan.start).first] = 1
        return np.where(self.may_be_chosen, np.cumsum(begins), -1)

    @property
    def everything(self) -> Index:
        """All tokens."""
        return Index.known(np.arange(len(self.tokens)), self._device)

    def entering(self, cut: int) -> Index:
        """The tokens that enter at a cut of the program."""
        fate = Fate.ENTERS + self.program.cuts.index(cut)
        return Index.known(np.flatnonzero(self._fates == fate), self._device)

    def at_all_layers(self, active: torch.Tensor) -> torch.Tensor:
        """Those of some flat indices that were computed from the first layer on."""
        return self.always.device if self.program.cuts else active

    def following(self) -> torch.Tensor:
        """int64 `[tokens]`, on the device: the token behind each; -1 where it is not known, or
        vLLM is to compute the token itself."""
        behind = [
            -1 if plan.token_at_stop is None or len(plan.suffix) else plan.token_at_stop
            for plan in self.plans
        ]
        ids = self.tokens.token_ids
        following = torch.cat([ids[1:], ids[:1]])
        last = upload(self.bounds[1:] - 1, self._device)
        following[last] = upload(np.asarray(behind, np.int64), self._device)
        return following

    def keep_auxiliary(self, layer: int, tokens: TokenTable, stream: torch.Tensor) -> None:
        """What enters a layer, of some of the tokens; the latest counts."""
        if layer not in self.auxiliary:
            shape = len(self.tokens), stream.shape[-1]
            self.auxiliary[layer] = stream.new_zeros(shape)
        self.auxiliary[layer][self.index_of(tokens).device] = stream

    def index_of(self, tokens: TokenTable) -> Index:
        """Which tokens of the batch these are."""
        first = self.bounds[:-1] - [plan.start for plan in self.plans]
        if tokens.host is not None:
            return Index.known(first[tokens.host.request] + tokens.host.positions, self._device)
        row = upload(first, self._device)[tokens.request] + tokens.positions
        return Index.computed(row)

    def chunk_tokens(self, most: int, num_layers: int) -> int:
        """Tokens that are computed at once, at so many layers.

        Args:
            most: that fit.
            num_layers: that they pass before others run.
        """
        if self.chunk_work is None:
            return most
        return min(most, max(1, self.chunk_work // max(1, num_layers)))

    def counts(self, index: Index) -> list[int]:
        """How many tokens of each plan are in an index that the host knows."""
        assert index.host is not None
        return np.diff(np.searchsorted(index.host, self.bounds)).tolist()

    @functools.cached_property
    def probe_ends(self) -> list[int]:
        """Behind which of the probes each plan's end; the same at all layers."""
        return np.cumsum(self.counts(self.probes)).tolist()

    def of_all(self, request: torch.Tensor, holds: torch.Tensor) -> torch.Tensor:
        """bool `[plans]`, on the device: of which plans something holds for all of some tokens.

        Args:
            request: of each token, int64 `[tokens]`.
            holds: bool `[tokens]`.
        """
        found = torch.ones(len(self.plans), dtype=torch.int64, device=self._device)
        return found.scatter_reduce_(0, request, holds.long(), "amin").bool()

    def num_active(self, active: torch.Tensor) -> torch.Tensor:
        """How many of these flat indices are each plan's, without its suffix; int64 `[plans]`, on
        the device."""
        counts = torch.zeros(len(self.plans), dtype=torch.int64, device=self._device)
        counted = torch.ones(len(self.tokens), dtype=torch.int64, device=self._device)
        counted[self.suffix.device] = 0
        return counts.scatter_add_(0, self.tokens.request[active], counted[active])

    def positions(
        self, active: torch.Tensor, request_ids: Collection[str]
    ) -> dict[str, tuple[int, ...]]:
        """Which tokens of some requests are among these flat indices, by request; waits for the
        device if any of them is here."""
        if not any(plan.request_id in request_ids for plan in self.plans):
            return {}
        host, flat = self.tokens.read_host(), active.cpu().numpy()
        request, positions = host.request[flat], host.positions[flat]
        return {
            plan.request_id: tuple(np.sort(positions[request == i]).tolist())
            for i, plan in enumerate(self.plans)
            if plan.request_id in request_ids
        }

    def slots(self, which: torch.Tensor, table: int = 0) -> torch.Tensor:
        """Where some tokens are written at layers of a table, int64 `[tokens]`, on the device.

        Args:
            which: flat indices.
        """
        if not table:
            return self.tokens.slots[which]
        return self.slots_of(self.tokens.take(Index(which, None)), table)

    def slots_of(self, tokens: TokenTable, table: int) -> torch.Tensor:
        """The same of some of the batch's tokens."""
        return self._layout.slots(tokens, self.block_tables, table)

    def table(self, number: int) -> torch.Tensor:
        """int32 `[plans, blocks]`, on the device: one of the block tables."""
        return self._layout.of(self.block_tables, number)

    def held(
        self, pages: torch.Tensor, strides: TiledStrides, part: slice = EVERY, table: int = 0
    ) -> torch.Tensor:
        """What the tokens' slots hold: `[tokens, heads, channels]`, in the type of the pages.

        Args:
            pages: flat pages `[num_blocks, page_elements]` of a layer.
            strides: where its keys, or its values, lie in a page.
            part: of which tokens.
            table: that the layer's pages are in.
        """
        positions, request = (it[part] for it in self.tokens.read_host())
        size = self._layout.block_size
        tables = self._layout.of(torch.from_numpy(_joined(self.plans)), table).numpy()
        blocks, which = np.unique(tables[request, positions // size], return_inverse=True)
        held = strides.tokens_of(pages, upload(blocks.astype(np.int64), self._device))
        token = upload(which * size + positions % size, self._device)
        return indexable(held)[token].view(pages.dtype)


def _joined(plans: list[ReusePlan]) -> np.ndarray:
    """int32 `[tables * plans, blocks]`: each table of all plans behind the one before."""
    rows = [
        plan.sources_and_table(table)[1]
        for table in range(1 + len(plans[0].others))
        for plan in plans
    ]
    tables = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for row, blocks in zip(tables, rows, strict=True):
        row[: len(blocks)] = blocks
    return tables
