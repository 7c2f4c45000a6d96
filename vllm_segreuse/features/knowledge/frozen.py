# SPDX-License-Identifier: Apache-2.0
"""Frozen blocks: KV that stays in GPU memory because the frozen pool holds a reference on it.

    add ──► warm ──┬─ release: it was deleted
                   ├─ eviction, under pressure: watched; returns when a prompt contains its text
                   └─ reset, sleep, new weights: forgotten until it is added again

Nothing else about a frozen block is special: it is an ordinary block of vLLM's pool, with its exact
name and its place in the segment index, and serves prefix hits and segments alike. An entry is what
is frozen and evicted as a whole (the text of a document); a long one consists of several parts,
each computed by a request of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.plan import FreezeOrder, IntArray

if TYPE_CHECKING:  # API servers do without numba, which it loads
    from vllm_segreuse.cache.rolling_hash import HashArray
    from vllm_segreuse.compat.block_pool import SegmentBlockPool


class FrozenPart(NamedTuple):
    """A part of an entry that was computed.

    Attributes:
        namespace: id in the `NamespaceTable`; the pool holds a reference on it.
        block_ids: blocks with tokens of the part, in order.
        probe: hash of a window of one block's length in the middle of the part; a prompt that has
            it contains the entry's text. None: the part is too short for one, or compressed.
        tokens: int32, of a compressed part (`segreuse_extras/compressed/finder.py`); None: the
            blocks hold the text itself.
        first: of a compressed part, position of its first token where it was made, which is in the
            first of the blocks.
    """

    namespace: int
    block_ids: list[int]
    probe: int | None
    tokens: IntArray | None = None
    first: int = 0


class EntryUse(NamedTuple):
    """How often an entry was used since the last `take_uses`, and when last (clock, seconds)."""

    hits: int
    last: float


def add_uses(uses: dict[str, EntryUse], entries: Iterable[str], now: float) -> None:
    """Count one more use of each entry."""
    for name in entries:
        uses[name] = EntryUse(uses[name].hits + 1 if name in uses else 1, now)


class WarmEntry(NamedTuple):
    """An entry all of whose parts are frozen.

    Attributes:
        num_blocks: blocks it holds.
        readers: running requests that hold them, too.
    """

    num_blocks: int
    readers: int


@dataclass
class _FrozenEntry:
    parts: list[FrozenPart | None]
    last_used: float

    @property
    def is_whole(self) -> bool:
        return None not in self.parts

    @property
    def block_ids(self) -> set[int]:
        return {block for part in self.parts if part for block in part.block_ids}


@dataclass
class _Watched:
    """An entry that was evicted. One without a probe is wanted when a request names it."""

    namespace: int
    probe: int | None
    num_blocks: int
    is_wanted: bool = False


class FrozenPool:
    """The entries that are frozen, and those that may return; one per engine.

    Args:
        blocks: the block pool.
        namespaces: where the namespaces of the entries are interned.
        num_blocks: blocks of the pool that requests can have.
        limit: most blocks that may be frozen.
        pressure: share of the blocks in use above which entries are evicted.
        returns: whether entries that were evicted are watched for.
        clock: seconds; entries used longest ago go first.
    """

    def __init__(
        self,
        blocks: SegmentBlockPool,
        namespaces: NamespaceTable,
        num_blocks: int,
        limit: int,
        pressure: float,
        returns: bool,
        clock: Callable[[], float],
    ) -> None:
        self.num_blocks = num_blocks
        self.limit = max(0, min(limit, num_blocks))
        self.num_evicted = 0
        self._blocks = blocks
        self._namespaces = namespaces
        self._max_in_use = int(pressure * num_blocks)
        self._returns = returns
        self._clock = clock
        self._entries: dict[str, _FrozenEntry] = {}
        self._of_block: dict[int, list[str]] = {}  # entries by block
        self._watched: dict[str, _Watched] = {}
        self._uses: dict[str, EntryUse] = {}

    @property
    def num_frozen(self) -> int:
        """Distinct blocks that the pool holds."""
        return len(self._of_block)

    @property
    def block_ids(self) -> list[int]:
        """The blocks that the pool holds, each once, in the order in which they were frozen."""
        return list(self._of_block)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._blocks.num_free_blocks()

    def is_sole_holder(self) -> bool:
        """Whether nobody else holds a block."""
        return self.num_free + self.num_reclaimable() == self.num_blocks

    def __contains__(self, entry: str) -> bool:
        """Whether parts of an entry are frozen."""
        return entry in self._entries

    def add(self, order: FreezeOrder, part: FrozenPart, instead_of: Container[str] = ()) -> bool:
        """Freeze a part of an entry. Doing so twice changes nothing.

        Args:
            order: names the part.
            part: its blocks.
            instead_of: entries that may be evicted to stay below the limit.

        Returns:
            False if the pool would exceed its limit, or has evicted or released the parts before
            this one. Nothing of the entry stays frozen then.

        Raises:
            ValueError: the part holds no block, or its entry has other parts.
        """
        if not part.block_ids:  # `_readers` looks at the first
            raise ValueError(f"part {order.part} of {order.entry} holds no block")
        entry = self._entries.get(order.entry)
        if entry is not None and len(entry.parts) != order.parts:
            raise ValueError(
                f"entry {order.entry} has {len(entry.parts)} parts, not {order.parts}: "
                "release it first"
            )
        if entry is None and order.part:
            return False
        if entry is not None and entry.parts[order.part] is not None:
            return True
        blocks = set(part.block_ids)
        self._evict_for(blocks, instead_of)
        new = self._not_frozen(blocks)
        if self.num_frozen + len(new) > self.limit:
            self.release([order.entry])
            return False
        self._blocks.pin(new)
        self._namespaces.acquire(part.namespace)
        if entry is None:
            entry = self._entries[order.entry] = _FrozenEntry([None] * order.parts, 0.0)
        entry.parts[order.part] = part
        entry.last_used = self._clock()
        for block in blocks:
            names = self._of_block.setdefault(block, [])
            if order.entry not in names:
                names.append(order.entry)
        self._unwatch(order.entry)
        return True

    def release(self, entries: Iterable[str]) -> None:
        """Forget entries; unknown ones are no error. Blocks that others hold stay with these."""
        with ExitStack() as each:  # an error over one does not keep the others
            for name in entries:
                each.callback(self._drop, name)
                each.callback(self._unwatch, name)
                self._uses.pop(name, None)

    def reset(self) -> None:
        """Release everything, and watch for nothing: the KV is about to become invalid."""
        with ExitStack() as each:
            for name in list(self._entries):
                each.callback(self._drop, name)
            for name in list(self._watched):
                each.callback(self._unwatch, name)

    def lost(self, block_ids: Sequence[int]) -> None:
        """vLLM has taken blocks' names away; entries of those that are frozen are cold."""
        if not self._of_block:
            return
        for block_id in block_ids:
            for name in list(self._of_block.get(block_id, ())):
                self._evict(name)

    def used(self, block_ids: Iterable[int]) -> None:
        """A request reuses blocks, as donors or as its prefix."""
        if not self._entries:
            return
        names = {name for block in block_ids for name in self._of_block.get(block, ())}
        now = self._clock()
        for name in names:
            self._entries[name].last_used = now
        add_uses(self._uses, names, now)

    def take_uses(self) -> dict[str, EntryUse]:
        """Uses since the last call."""
        uses, self._uses = self._uses, {}
        return uses

    def warm(self) -> dict[str, WarmEntry]:
        """All entries that are frozen as a whole."""
        return {
            name: WarmEntry(len(entry.block_ids), self._readers(entry))
            for name, entry in self._entries.items()
            if entry.is_whole
        }

    # Pressure.

    def relieve(self) -> None:
        """Evict entries until no more blocks are in use than the pressure allows."""
        excess = self.num_blocks - self.num_free - self._max_in_use
        if excess > 0 and self._entries:
            self.make_free(excess)

    def make_free(self, count: int) -> int:
        """Evict entries until `count` blocks have become free, or none is left.

        First those that the fewest running requests hold, which frees most; among equals the one
        that was used longest ago.

        Returns:
            Blocks that became free.
        """
        before = self.num_free
        freed = 0
        if count > 0:
            for name in sorted(self._entries, key=self._rank):
                self._evict(name)
                freed = self.num_free - before
                if freed >= count:
                    break
        return freed

    def num_reclaimable(self) -> int:
        """Blocks that nobody else holds: free if all entries were evicted."""
        return sum(self._blocks.references(block) == 1 for block in self._of_block)

    # Return.

    def notice(self, namespace: int, make_hashes: Callable[[], HashArray]) -> None:
        """A prompt was sent: the watched entries of its namespace that it contains are wanted.

        Args:
            make_hashes: hashes of all windows of the prompt; called only if anything is watched.
        """
        here = (w for w in self._watched.values() if w.namespace == namespace)
        watched = [(w.probe, w) for w in here if w.probe is not None]
        if not watched:
            return
        probes = np.fromiter((probe for probe, _ in watched), np.uint64, len(watched))
        for found, (_, entry) in zip(np.isin(probes, make_hashes()), watched, strict=True):
            entry.is_wanted |= bool(found)

    def named(self, namespace: int, names: Iterable[str]) -> None:
        """A request names entries: those of its namespace that were evicted are wanted."""
        for name in names:
            watched = self._watched.get(name)
            if watched is not None and watched.namespace == namespace:
                watched.is_wanted = True

    def compressed(
        self, name: str, namespace: int, so_far: bool = False
    ) -> list[FrozenPart] | None:
        """The parts of a compressed entry; None unless all of them are frozen in this namespace.

        Args:
            so_far: those that there are.
        """
        entry = self._entries.get(name)
        parts = [] if entry is None else [part for part in entry.parts if part is not None]
        if entry is None or not (entry.is_whole or so_far):
            return None
        if any(part.tokens is None or part.namespace != namespace for part in parts):
            return None
        return parts

    def wanted(self) -> list[str]:
        """Entries to be computed again: wanted, and returning without any pressure."""
        room = self.num_free - (self.num_blocks - self._max_in_use)
        names = []
        for name, entry in self._watched.items():
            if entry.is_wanted and entry.num_blocks <= room:
                names.append(name)
                room -= entry.num_blocks
        return names

    def _rank(self, name: str) -> tuple[int, float]:
        entry = self._entries[name]
        return self._readers(entry), entry.last_used

    def _readers(self, entry: _FrozenEntry) -> int:
        # Requests share blocks by their exact prefix, so whoever holds any holds the first.
        firsts = {part.block_ids[0] for part in entry.parts if part}
        return sum(self._blocks.references(block) - 1 for block in firsts)

    def _evict_for(self, blocks: Iterable[int], candidates: Container[str]) -> None:
        """Evict candidates, in the order of `make_free`, until these blocks fit below the limit."""
        for name in sorted(filter(candidates.__contains__, self._entries), key=self._rank):
            if self.num_frozen + len(self._not_frozen(blocks)) <= self.limit:
                break
            self._evict(name)

    def _not_frozen(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block not in self._of_block]

    def _evict(self, name: str) -> None:
        entry = self._entries[name]
        known = [part for part in entry.parts if part is not None]
        probed = [p for p in known if p.probe is not None or p.tokens is not None]
        num_blocks = len(entry.block_ids)
        if self._returns and entry.is_whole and probed:
            self._namespaces.acquire(probed[0].namespace)
            self._watched[name] = _Watched(probed[0].namespace, probed[0].probe, num_blocks)
        self._drop(name)
        self.num_evicted += 1

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        unheld: dict[int, None] = {}
        for part in entry.parts:
            if part is None:
                continue
            # Last block first: vLLM evicts in the order in which blocks became free.
            for block in reversed(part.block_ids):
                names = self._of_block.get(block, [])
                if name in names:
                    names.remove(name)
                    if not names:
                        del self._of_block[block]
                        unheld[block] = None
        with ExitStack() as each:
            for part in entry.parts:
                if part is not None:
                    each.callback(self._namespaces.release, part.namespace)
            each.callback(self._blocks.unpin, list(unheld))

    def _unwatch(self, name: str) -> None:
        watched = self._watched.pop(name, None)
        if watched is not None:
            self._namespaces.release(watched.namespace)
