# SPDX-License-Identifier: Apache-2.0
"""Which records a store of files holds, as one engine knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from segreuse_store.format import StoredRecord

LabelsOf = Callable[[bytes], Iterable[bytes]]
"""Labels of a record, from its `about`: digests that it is looked for by."""


def no_labels(about: bytes) -> Iterable[bytes]:
    """Records are looked for by their keys only."""
    return ()


class Residents:
    """Records on disk, by key, by file and, until they are claimed, by label. For one thread.

    Other engines add and remove records, too, and this follows a little later (`watching.py`): what
    is named here may be gone, and is then a miss.

    Args:
        at_start: records that are there; none of them is claimed.
        labels_of: labels of a record.
    """

    def __init__(
        self, at_start: Iterable[StoredRecord] = (), labels_of: LabelsOf = no_labels
    ) -> None:
        self._by_key: dict[bytes, StoredRecord] = {}
        self._keys: dict[str, bytes] = {}
        self._labels_of = labels_of
        self._unclaimed: dict[bytes, dict[bytes, None]] = defaultdict(dict)
        for record in at_start:
            self.add(record)
        self.unclaim()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[StoredRecord]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> StoredRecord | None:
        """The record of a key, or None."""
        return self._by_key.get(key)

    def named(self, name: str) -> StoredRecord | None:
        """The record of a file, or None."""
        key = self._keys.get(name)
        return None if key is None else self._by_key[key]

    def add(self, record: StoredRecord) -> bool:
        """A record is there; returns whether none with its key was."""
        before = self._by_key.get(record.key)
        if before is not None:
            del self._keys[before.name]
        self._by_key[record.key] = record
        self._keys[record.name] = record.key
        return before is None

    def remove(self, name: str) -> StoredRecord | None:
        """The record whose file has gone; None: it is not known, or was replaced."""
        record = self.named(name)
        if record is None:
            return None
        del self._by_key[record.key], self._keys[name]
        for label in self._labels_of(record.about):
            if (keys := self._unclaimed.get(label)) is not None:
                keys.pop(record.key, None)
                if not keys:
                    del self._unclaimed[label]
        return record

    # By label.

    @property
    def num_unclaimed(self) -> int:
        """Labels of records that are not claimed; a record counts once for each of its labels."""
        return sum(map(len, self._unclaimed.values()))

    def offer(self, record: StoredRecord) -> None:
        """A record is claimed by whoever claims one of its labels next."""
        for label in self._labels_of(record.about):
            self._unclaimed[label][record.key] = None

    def unclaim(self) -> None:
        """All records are offered, whether they were claimed or not."""
        self._unclaimed.clear()
        for record in self:
            self.offer(record)

    def claim(self, label: bytes) -> list[StoredRecord]:
        """Records with a label that nobody has claimed by it."""
        keys = self._unclaimed.pop(label, ())
        return [record for key in keys if (record := self._by_key.get(key)) is not None]
