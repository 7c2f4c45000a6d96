# SPDX-License-Identifier: Apache-2.0
"""Which records a store of files holds, as one engine knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_segreuse.tier.format import DiskRecord


class Residents:
    """Records on disk, by key. For one thread.

    Other engines add and remove records, too, and this follows a little later (`watching.py`): what
    is named here may be gone, and is then a miss.
    """

    def __init__(self, at_start: Iterable[DiskRecord] = ()) -> None:
        self._by_key: dict[bytes, DiskRecord] = {}
        self._keys: dict[str, bytes] = {}
        for kept in at_start:
            self.add(kept)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[DiskRecord]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> DiskRecord | None:
        """The record of a key, or None."""
        return self._by_key.get(key)

    def named(self, name: str) -> DiskRecord | None:
        """The record of a file, or None."""
        key = self._keys.get(name)
        return None if key is None else self._by_key[key]

    def add(self, kept: DiskRecord) -> bool:
        """A record is there; returns whether none with its key was."""
        before = self._by_key.get(kept.key)
        if before is not None:
            del self._keys[before.name]
        self._by_key[kept.key] = kept
        self._keys[kept.name] = kept.key
        return before is None

    def remove(self, name: str) -> DiskRecord | None:
        """The record whose file has gone; None: it is not known, or was replaced."""
        kept = self.named(name)
        if kept is not None:
            del self._by_key[kept.key], self._keys[name]
        return kept
