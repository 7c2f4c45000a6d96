# SPDX-License-Identifier: Apache-2.0
"""Block pool, segment index, tier and workers, as small as they can be; every content is known.

What a block or a row holds is a pair: its tokens and its position. A step's writes happen behind
its copies, and each rank carries out steps, and reports them, in its own time.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from bench.integrity import check_integrity
from tests.tier.fakes import Files, Region, mark
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches, find_matches
from vllm_segreuse.cache.namespace import NamespaceTable, namespace_key
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.cache.second_tier import by_tier, on_rows
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.features.tier.catalogue import RecordCatalogue
from vllm_segreuse.features.tier.files import FileTier
from vllm_segreuse.features.tier.host_rows import HostRows
from vllm_segreuse.features.tier.naming import record_keys
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.store import RecordPlaces, TierStore
from vllm_segreuse.plan import IntArray, Pieces, Tier, TierDone, TierOrders
from vllm_segreuse.scheduling.health import Health

SIZE = 4
NAMESPACE = namespace_key(("docs",), None, None, ())
Content = tuple[tuple[int, ...], int]


class Read(NamedTuple):
    """What a plan takes from a row."""

    row: int
    offset: int
    tokens: tuple[int, ...]
    position: int


class Step(NamedTuple):
    """What leaves for the workers."""

    orders: TierOrders | None
    reads: list[Read]
    writes: dict[int, Content]


class Rank:
    """A worker; its cell of a row of the region is a byte."""

    def __init__(self, number: int, region: Region) -> None:
        self.number = number
        self.cells = region.memory[:, number]
        self.blocks: dict[int, Content] = {}
        self.rows: dict[int, Any] = {}
        self.steps: deque[Step] = deque()
        self.done = TierDone()
        self.read = 0

    def run(self, fails: bool = False) -> None:
        """Carry out the oldest step."""
        if not self.steps:
            return
        step = self.steps.popleft()
        if step.orders is not None:
            for block, row in zip(step.orders.blocks, step.orders.rows, strict=True):
                self.rows[int(row)] = None if fails else self.blocks[int(block)]
                self.cells[row] = mark(self.blocks[int(block)])
            failed = {step.orders.sequence} if fails and len(step.orders.rows) else set()
            report = TierDone(Counter({step.orders.sequence: 1}), failed)
            self.done = self.done.merged(report)
        for read in step.reads:
            tokens, position = self.rows[read.row]
            assert tokens[read.offset : read.offset + len(read.tokens)] == read.tokens
            assert position + read.offset == read.position
            assert self.cells[read.row] == mark(self.rows[read.row]), "zeroed while it is read"
            self.read += 1
        self.blocks |= step.writes

    def report(self) -> TierDone:
        """What has come of steps since the last report."""
        done, self.done = self.done, TierDone()
        return done


class World:
    """An engine.

    Args:
        blocks: of the pool.
        rows: of the region.
        ranks: workers.
        files: whether there is a store of files.
        behind: makes another tier of the host region, in its place.
    """

    def __init__(
        self,
        blocks: int = 8,
        rows: int = 4,
        ranks: int = 1,
        files: bool = False,
        most_files: int = 10**6,
        behind: Callable[[memoryview], SecondaryTierManager] | None = None,
        **options: Any,
    ) -> None:
        self.num_blocks, self.now_s = blocks, 0.0
        self.index = SegmentIndex(blocks + rows + (4 * rows if files or behind else 0), SIZE)
        self.namespaces = NamespaceTable(lambda namespace: self.index.population(namespace) > 0)
        self.names: dict[int, tuple[bytes, bool]] = {}
        self.region = Region(rows)
        self.ranks = [Rank(number, self.region) for number in range(ranks)]
        given = TierOptions(**{"min_run_tokens": 1} | options)
        self.rows = HostRows(self.region, given.zeroise)  # type: ignore[arg-type]
        held = [rank.rows for rank in self.ranks]
        self.files = Files(self.region, held, most_files) if files else None
        view = self.rows.get_kv_memoryview()
        tiers = [] if self.files is None else [FileTier(view, self.files)]
        tiers += [] if behind is None else [behind(view)]
        self.manager = TieringOffloadingManager(self.rows, tiers)
        self.key_of = record_keys(b"model", self.names.get)
        self.catalogue = RecordCatalogue(self.index, self.namespaces, blocks, self.key_of)
        self.health, self.stats = Health(), SegReuseStats()
        self.tier = TierStore(
            RecordPlaces(self.manager, self.rows, self.files),
            self.catalogue,
            ranks,
            given,
            self.health,
            self.stats,
            clock=lambda: self.now_s,
        )
        self._numbers = itertools.count()
        self._free = deque(range(blocks))
        self._reads: list[Read] = []
        self._writes: dict[int, Content] = {}

    @property
    def chunks(self) -> dict[Any, Any]:
        """vLLM's rows by key."""
        return self.rows.chunks

    # What vLLM does.

    def compute(
        self,
        tokens: list[int],
        position: int = 0,
        depth: int = 0,
        parent: int = -1,
        key: bytes = NAMESPACE,
    ) -> list[int]:
        """Blocks get other content, in the order in which they are free; returns their ids."""
        count = len(tokens) // SIZE
        ids = [self._free.popleft() for _ in range(count)]
        self._free.extend(reversed(ids))  # as vLLM does: the last one is taken first
        self.tier.evicting([block for block in ids if block in self.names])
        for block in ids:
            if self.names.pop(block, None) is not None:
                self.index.remove([block])
        namespace = self.namespaces.intern(key)
        for i, block in enumerate(ids):
            own = tuple(tokens[i * SIZE : (i + 1) * SIZE])
            at = position + i * SIZE
            chain = hash((at, tuple(tokens[: (i + 1) * SIZE])))
            name = chain if depth == 0 else next(self._numbers)
            self.names[block] = str(name).encode(), depth == 0
            self._writes[block] = own, at
        self.index.insert(
            namespace,
            np.asarray(ids, np.int32),
            np.asarray(tokens[: count * SIZE], np.int32),
            position,
            parent_block=parent,
            depths=depth,
        )
        self.namespaces.release(namespace)
        return ids

    def take_next(self, blocks: list[int]) -> None:
        """These blocks, which are free, are taken before any other."""
        others = [block for block in self._free if block not in blocks]
        self._free = deque([*blocks, *others])

    def evict(self, blocks: list[int]) -> None:
        """Blocks are taken for tokens that donate nothing."""
        self.tier.evicting(blocks)
        for block in blocks:
            self.names.pop(block, None)
            self.index.remove([block])
            self._writes[block] = ((-1,) * SIZE, 0)

    def end_step(self) -> TierOrders | None:
        """The step leaves."""
        orders = self.tier.take_orders()
        for rank in self.ranks:
            rank.steps.append(Step(orders, list(self._reads), dict(self._writes)))
        self._reads, self._writes = [], {}
        self.index.begin_step()
        return orders

    def work(self, fails: bool = False) -> None:
        """All ranks do what they have, and report it."""
        for rank in self.ranks:
            while rank.steps:
                rank.run(fails and rank.number == 0)
            self.tier.note(rank.report())

    def step(self, fails: bool = False) -> TierOrders | None:
        """A step that is over."""
        orders = self.end_step()
        self.work(fails)
        return orders

    def reset(self) -> None:
        """Of the prefix cache, as the pool's listeners do it."""
        self.names.clear()
        self.index.clear()
        self.tier.reset()

    # What the planner does.

    def match(self, tokens: list[int], key: bytes = NAMESPACE) -> Matches:
        """What is found for a prompt."""
        prompt = np.asarray(tokens, np.int32)
        namespace = self.namespaces.intern(key)
        hashes = window_hashes(prompt, SIZE)
        found = find_matches(self.index, namespace, prompt, hashes, 0, len(tokens), max_depth=4)
        self.namespaces.release(namespace)
        return by_tier(found, self.tier)

    def hold(self, request_id: str, tokens: list[int]) -> Pieces | None:
        """Pieces of a plan, which holds what it reads; None: not now."""
        found = on_rows(self.match(tokens), self.tier, request_id)
        return None if found is None else found.pieces

    def send(self, request_id: str, tokens: list[int], pieces: Pieces) -> None:
        """The plan leaves with this step."""
        columns = (pieces.destination, pieces.length, pieces.block, pieces.offset, pieces.position)
        table = np.stack(columns, axis=1)[pieces.source == Tier.HOST].tolist()
        for to, length, row, offset, position in table:
            self._reads.append(Read(row, offset, tuple(tokens[to : to + length]), position))
        self.tier.sent([request_id])

    def rows_of(self, blocks: IntArray) -> list[int]:
        """Ids as a list."""
        return [int(block) for block in blocks]

    def check(self) -> None:
        """AssertionError with what is wrong."""
        check_integrity(self.index)
        check_integrity(self.catalogue)
        assert not self.tier.health.broken
        in_host = {record.key for record in self.catalogue if record.in_host}
        ready = {key for key, chunk in self.chunks.items() if chunk.is_ready}
        if self.tier.is_open:
            assert in_host == ready, "the catalogue and vLLM disagree on what is in host memory"
            if self.rows.zeroises:
                assert not self.left_over(), "rows that are free hold something"
        for record in self.catalogue:
            if record.shown:
                assert record.entry in self.index
                assert record.in_host or record.on_disk or record.storing
        shown = sum(record.shown for record in self.catalogue)
        known = sum(block in self.index for block in range(self.num_blocks))
        assert len(self.index) == known + shown, "the index knows a record that is none"
        counts = self.tier.counts()
        assert counts.host == len(in_host)
        assert counts.disk == sum(record.on_disk for record in self.catalogue)

    def left_over(self) -> list[int]:
        """Rows that are free and hold something."""
        taken = {chunk.chunk_id for chunk in self.chunks.values()}
        filled = self.region.memory.any(axis=1).nonzero()[0].tolist()
        return [row for row in filled if row not in taken]

    def check_idle(self) -> None:
        """Nothing is held once everything is over."""
        self.check()
        counts = self.tier.counts()
        assert (counts.holds, counts.steps, counts.jobs) == (0, 0, 0), counts
        assert all(chunk.ref_cnt == 0 for chunk in self.chunks.values()), "a row is still held"
        assert self.rows.num_replaceable == len(self.chunks)
        assert all(record.shown == (record.last_seen is None) for record in self.catalogue)
        seen = [record.last_seen for record in self.catalogue if record.last_seen is not None]
        assert self.namespaces.num_references == sum(len(found.namespaces) for found in seen)
