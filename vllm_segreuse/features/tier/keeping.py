# SPDX-License-Identifier: Apache-2.0
"""Documents of knowledge bases in the second tier: written through, durable, removed by name.

keep ────► records are stored with the next step ────► moved: in host memory, on disk, or lost
release ─► files are erased; rows in host memory are replaced in their turn, or with
           `tier.zeroise` zeroed as soon as nobody uses them
restart ─► what the journal names and the files still have
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from segreuse_store import FileStore, GroupJournal
from vllm_segreuse.features.knowledge.frozen import EntryUse, add_uses
from vllm_segreuse.features.knowledge.kept import KeptEntries, Place
from vllm_segreuse.scheduling.health import Health


class WritingStore(Protocol):
    """What is needed of the tier's store (`TierStore`)."""

    def write_through(self, block_ids: Sequence[int]) -> list[bytes]: ...

    def is_on_host(self, key: bytes) -> bool: ...

    def erase(self, keys: Iterable[bytes]) -> None: ...


class Keeping:
    """A `cache.kept.KeepingTier`; one per engine, in the scheduler's thread.

    Args:
        store: copies blocks.
        capacity_blocks: records that host memory, or the files, hold.
        health: of the second tier.
        clock: seconds since 1970.
        files: None where nothing outlives the process.
        journal: of an earlier run; None without files.
        key_of: key of the record of a block; None: it has no name.
    """

    def __init__(
        self,
        store: WritingStore,
        capacity_blocks: int,
        health: Health,
        clock: Callable[[], float],
        files: FileStore | None = None,
        journal: GroupJournal | None = None,
        key_of: Callable[[int], bytes | None] = lambda block: None,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self._store = store
        self._health = health
        self._clock = clock
        self._uses: dict[str, EntryUse] = {}
        self._lost: set[str] = set()
        self._unstored: dict[str, set[bytes]] = {}  # which GPU memory has all the same
        self._key_of = key_of
        self._files = files
        self._kept = KeptEntries(journal)
        if files is not None and journal is not None:
            files.erase(self._kept.restore(journal.at_start(), files.lookup))
            durable = (record.key for record in files.records() if record.durable)
            files.erase([key for key in durable if key not in self._kept])

    def is_durable(self, key: bytes) -> bool:
        """Whether a record is part of a document."""
        return key in self._kept

    # Knowledge bases.

    def keep(self, entry: str, part: int, parts: int, block_ids: list[int]) -> bool:
        """See `KeepingTier`."""
        with self._health.contained("a document"):
            keys = self._store.write_through(block_ids)
            if not keys:
                named = filter(None, map(self._key_of, block_ids))
                self._unstored.setdefault(entry, set()).update(named)
                return False
            self._erase(self._kept.keep(entry, part, parts, keys))
            if self._files is not None:
                self._files.set_durable(keys, True)
            for key in keys:
                self.moved(key, on_host=self._store.is_on_host(key), on_disk=self._is_on_disk(key))
            return True
        return False

    def release(self, entries: Iterable[str]) -> None:
        """See `KeepingTier`."""
        with self._health.contained("the removal of documents"):
            names = list(entries)
            gone = self._kept.release(names)
            unstored = set().union(*(self._unstored.pop(name, ()) for name in names))
            self._erase([*gone, *(key for key in unstored if key not in self._kept)])
            self._lost.difference_update(names)
            for name in names:
                self._uses.pop(name, None)

    def held(self) -> dict[str, Place]:
        """See `KeepingTier`."""
        return {} if self._health.broken else self._kept.held()

    def lost(self) -> list[str]:
        """See `KeepingTier`."""
        self._lost -= self.held().keys()
        return [] if self._health.broken else sorted(self._lost)

    def take_uses(self) -> dict[str, EntryUse]:
        """See `KeepingTier`."""
        uses, self._uses = self._uses, {}
        return uses

    def _erase(self, keys: list[bytes]) -> None:
        if not keys:
            return
        if self._files is not None:
            self._files.erase(keys)
        self._store.erase(keys)

    # The tier.

    def read(self, keys: Iterable[bytes]) -> None:
        """A plan reads these records."""
        add_uses(self._uses, self._kept.owners(keys), self._clock())

    def moved(
        self, key: bytes, *, on_host: bool | None = None, on_disk: bool | None = None
    ) -> None:
        """A record is somewhere, or no longer; None: that is as before."""
        if key in self._kept:
            was_on_host, was_on_disk = self._kept.place(key)
            self._kept.placed(
                key,
                was_on_host if on_host is None else on_host,
                was_on_disk if on_disk is None else on_disk,
            )

    def dropped(self, keys: Iterable[bytes]) -> None:
        """Records could not be stored."""
        self._lost |= self._kept.owners(keys)

    def cleared(self) -> None:
        """Host memory was cleared, and files are hidden: the model may have other weights."""
        self._lost.clear()
        self._unstored.clear()
        for key in self._kept.records():
            self._kept.placed(key, False, False)

    def revealed(self) -> None:
        """The files are those of the model's weights."""
        for key in self._kept.records():
            self.moved(key, on_disk=self._is_on_disk(key))

    def _is_on_disk(self, key: bytes) -> bool:
        return self._files is not None and self._files.lookup(key)
