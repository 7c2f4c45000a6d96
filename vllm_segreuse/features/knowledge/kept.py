# SPDX-License-Identifier: Apache-2.0
"""Entries of knowledge bases in the second tier: what they consist of, and whether all of it is
there.

An entry is the text of a document in its context (`frozen.py`). When a part of it is frozen, its
blocks are written through to the tier as records. An entry that is held there as a whole needs no
prefill when it leaves GPU memory, and none after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from vllm_segreuse.features.knowledge.frozen import EntryUse

if TYPE_CHECKING:
    from segreuse_store import GroupJournal

Place = Literal["host", "disk"]
"""Where an entry is held: `host` if all of it is in host memory."""


class KeepingTier(Protocol):
    """What the frozen pool and knowledge bases need of the second tier."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks that entries may take there."""

    def keep(self, entry: str, part: int, parts: int, block_ids: list[int]) -> bool:
        """Copy a part of an entry that was just computed; doing so twice changes nothing.

        Returns:
            False if it takes nothing now. What it finds no room for later is `lost`.
        """

    def release(self, entries: Iterable[str]) -> None:
        """Remove entries that were deleted; unknown ones are no error."""

    def held(self) -> dict[str, Place]:
        """Entries all of whose records are there."""

    def lost(self) -> list[str]:
        """Entries that could not be copied as a whole, for lack of room at that moment or after an
        error: they have to be computed again."""

    def take_uses(self) -> dict[str, EntryUse]:
        """Requests that have read entries from there, since the last call."""


@dataclass
class _RetainedEntry:
    parts: list[tuple[bytes, ...] | None]
    keys: set[bytes] = field(default_factory=set)
    num_here: int = 0
    num_on_host: int = 0

    @property
    def place(self) -> Place | None:
        if None in self.parts or self.num_here < len(self.keys):
            return None
        return "host" if self.num_on_host == len(self.keys) else "disk"


class KeptEntries:
    """Entries by name, and the entries of each record. Lives in the scheduler's thread.

    Args:
        journal: told of every change; None where entries do not outlive the process.
    """

    def __init__(self, journal: GroupJournal | None = None) -> None:
        self._journal = journal
        self._entries: dict[str, _RetainedEntry] = {}
        self._owners: dict[bytes, set[str]] = {}
        self._places: dict[bytes, tuple[bool, bool]] = {}  # of kept records: on host, on disk

    def __contains__(self, key: bytes) -> bool:
        """Whether an entry has this record."""
        return key in self._owners

    def records(self) -> list[bytes]:
        """Records of all entries."""
        return [*self._owners]

    def owners(self, keys: Iterable[bytes]) -> set[str]:
        """Entries that have any of these records."""
        return {entry for key in keys for entry in self._owners.get(key, ())}

    def keep(self, entry: str, part: int, parts: int, keys: Sequence[bytes]) -> list[bytes]:
        """A part consists of these records, whether they are there yet or not: report each with
        `placed`.

        Returns:
            Records that no entry has any more: the entry was cut into other parts before.
        """
        known = self._entries.get(entry)
        replaced: set[bytes] = set()
        if known is not None:
            before = known.parts[part] if len(known.parts) == parts else ()
            if before == tuple(keys):
                return []
            if before is not None:
                replaced = self._entries.pop(entry).keys
        self._put(entry, part, parts, keys)
        if self._journal is not None:
            if replaced:
                self._journal.released([entry])
            self._journal.kept(entry, part, parts, keys)
        return self._disown(entry, replaced - self._entries[entry].keys)

    def release(self, entries: Iterable[str]) -> list[bytes]:
        """Forget entries; unknown ones are no error.

        Returns:
            Records that no entry has any more.
        """
        known = {name: self._entries.pop(name) for name in entries if name in self._entries}
        if known and self._journal is not None:
            self._journal.released([*known])
        return [key for name, entry in known.items() for key in self._disown(name, entry.keys)]

    def placed(self, key: bytes, on_host: bool, on_disk: bool) -> None:
        """A record is here or there, or nowhere, from now on; one that no entry has is ignored."""
        for name in self._owners.get(key, ()):
            self._count(self._entries[name], key, -1)
        if key in self._owners:
            self._places[key] = on_host, on_disk
        for name in self._owners.get(key, ()):
            self._count(self._entries[name], key, 1)

    def place(self, key: bytes) -> tuple[bool, bool]:
        """Whether a record is in host memory, and whether on disk, as was reported last."""
        return self._places.get(key, (False, False))

    def held(self) -> dict[str, Place]:
        """Entries all of whose parts are known, and all of whose records are there."""
        places = ((name, entry.place) for name, entry in self._entries.items())
        return {name: place for name, place in places if place is not None}

    def restore(
        self,
        rows: Iterable[tuple[str, int, int, Sequence[bytes]]],
        is_on_disk: Callable[[bytes], bool],
    ) -> list[bytes]:
        """Continue with what a journal has of an earlier run.

        Entries that are not whole on disk are released: they have to be computed again, and may
        belong to no document any more.

        Args:
            rows: entry, part, parts, records.

        Returns:
            Records that no entry has any more.
        """
        for entry, part, parts, keys in rows:
            known = self._entries.get(entry)
            if known is None or len(known.parts) == parts:
                self._put(entry, part, parts, keys)
        for key in self.records():
            self.placed(key, False, is_on_disk(key))
        held = self.held()
        return self.release([name for name in self._entries if name not in held])

    def _put(self, name: str, part: int, parts: int, keys: Sequence[bytes]) -> None:
        entry = self._entries.setdefault(name, _RetainedEntry([None] * parts))
        entry.parts[part] = tuple(keys)
        for key in set(keys) - entry.keys:
            entry.keys.add(key)
            self._owners.setdefault(key, set()).add(name)
            self._count(entry, key, 1)

    def _disown(self, name: str, keys: Iterable[bytes]) -> list[bytes]:
        gone = []
        for key in keys:
            self._owners[key].discard(name)
            if not self._owners[key]:
                del self._owners[key]
                self._places.pop(key, None)
                gone.append(key)
        return gone

    def _count(self, entry: _RetainedEntry, key: bytes, sign: int) -> None:
        on_host, on_disk = self.place(key)
        entry.num_here += sign * (on_host or on_disk)
        entry.num_on_host += sign * on_host
