# SPDX-License-Identifier: Apache-2.0
"""A second tier without any KV, which keeps entries: the real bookkeeping on counted records."""

import math
from collections.abc import Iterable, Sequence

from vllm_segreuse.features.knowledge.frozen import EntryUse
from vllm_segreuse.features.knowledge.kept import KeptEntries, Place


class Journal:
    """What a restart finds."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], tuple[int, tuple[bytes, ...]]] = {}

    def kept(self, entry: str, part: int, parts: int, keys: Sequence[bytes]) -> None:
        self.rows[entry, part] = parts, tuple(keys)

    def released(self, entries: Sequence[str]) -> None:
        self.rows = {key: row for key, row in self.rows.items() if key[0] not in entries}

    def read(self) -> list[tuple[str, int, int, tuple[bytes, ...]]]:
        return [(entry, part, *row) for (entry, part), row in self.rows.items()]


class FakeTier:
    """Keeps at once, and only what it is told to lose is lost.

    Attributes:
        has_disk: what is kept outlives a restart.
        calls: parts that were kept, in order.
        room: records that can be kept until there is more.
        is_off: whether it takes nothing.
    """

    def __init__(self, capacity_blocks: int = 1000, has_disk: bool = True) -> None:
        self.capacity_blocks = capacity_blocks
        self.has_disk = has_disk
        self.room: float = math.inf
        self.is_off = False
        self.uses: dict[str, EntryUse] = {}
        self.calls: list[tuple[str, int, int, int]] = []
        self._journal = Journal()
        self._kept = KeptEntries(self._journal)
        self._on_disk: set[bytes] = set()
        self._lost: set[str] = set()

    def keep(self, entry: str, part: int, parts: int, block_ids: list[int]) -> bool:
        if self.is_off:
            return False
        self.calls.append((entry, part, parts, len(block_ids)))
        keys = [f"{entry} {part} {block}".encode() for block in range(len(block_ids))]
        self._kept.keep(entry, part, parts, keys)
        if self.room < len(keys):
            self._lost.add(entry)
            return True
        self.room -= len(keys)
        for key in keys:
            self._kept.placed(key, True, self.has_disk)
        self._on_disk.update(keys if self.has_disk else ())
        return True

    def release(self, entries: Iterable[str]) -> None:
        self._on_disk.difference_update(self._kept.release(entries))

    def held(self) -> dict[str, Place]:
        return self._kept.held()

    def lost(self) -> list[str]:
        self._lost -= self.held().keys()
        return sorted(self._lost)

    def take_uses(self) -> dict[str, EntryUse]:
        return self.uses

    def lose_host(self) -> None:
        """All of host memory was taken for others."""
        for key in self._kept.records():
            self._kept.placed(key, False, key in self._on_disk)

    def lose_disk(self) -> None:
        """All records on disk are gone; those in host memory stay until these are lost, too."""
        self._on_disk.clear()

    def lose(self, entry: str) -> None:
        """One record of an entry is found damaged."""
        key = next(key for key in self._kept.records() if entry in self._kept.owners([key]))
        self._on_disk.discard(key)
        self._kept.placed(key, False, False)

    def restart(self) -> None:
        """Another process opens what is on disk."""
        self._kept = KeptEntries(self._journal)
        gone = self._kept.restore(self._journal.read(), self._on_disk.__contains__)
        self._on_disk.difference_update(gone)
