# SPDX-License-Identifier: Apache-2.0
"""What a store of files holds, and what it may take: the budget, and what is removed for what."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from vllm_segreuse.tier.format import Kept


class Slot(NamedTuple):
    """A place for one record, which `fill`, `vacate` or `block` ends.

    Attributes:
        victim: what is still in it, and must be removed first.
    """

    victim: Kept | None


class Residents:
    """Records on disk, from the least to the most recently used. For one thread.

    The budget is a number of slots. A record has one from before its file is made until after its
    file was removed. So files never take more than the budget, whatever fails in between.
    """

    def __init__(self, slots: int, at_start: Iterable[Kept] = ()) -> None:
        """Start with the records of a store.

        Args:
            slots: most records that may be on disk.
            at_start: from the least to the most recently used.
        """
        self._slots = slots
        self._ordinary: OrderedDict[bytes, Kept] = OrderedDict()
        self._durable: OrderedDict[bytes, Kept] = OrderedDict()
        self._reading: Counter[bytes] = Counter()
        self._open = 0
        self._blocked: list[Kept] = []
        for kept in at_start:
            self._add(kept)

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._durable)

    def __iter__(self) -> Iterator[Kept]:
        return chain(self._ordinary.values(), self._durable.values())

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self) + self._open + len(self._blocked)

    def get(self, key: bytes) -> Kept | None:
        """The record of a key, or None."""
        return self._ordinary.get(key) or self._durable.get(key)

    def touch(self, key: bytes) -> Kept | None:
        """The record of a key, now the most recently used; None: there is none."""
        kept = self.get(key)
        if kept is not None:
            self._like(kept).move_to_end(key)
        return kept

    def set_durable(self, key: bytes, durable: bool) -> Kept | None:
        """The record as it has changed; None: it has not."""
        kept = self.get(key)
        if kept is None or kept.durable == durable:
            return None
        del self._like(kept)[key]
        changed = kept._replace(durable=durable)
        self._add(changed)
        return changed

    def begin_read(self, key: bytes) -> Kept | None:
        """The record of a key, which is no victim until `end_read`; None: there is none."""
        kept = self.touch(key)
        if kept is not None:
            self._reading[key] += 1
        return kept

    def end_read(self, key: bytes) -> None:
        """A read is over."""
        self._reading[key] -= 1
        if not self._reading[key]:
            del self._reading[key]

    def excess(self) -> list[Kept]:
        """Takes what is above the budget, which was larger when it was stored."""
        return [self._taken() for _ in range(self.used - self._slots)]

    def _taken(self) -> Kept:
        oldest = self._oldest(durable=True)
        assert oldest is not None
        del self._like(oldest)[oldest.key]
        return oldest

    def reserve(self, durable: bool) -> Slot | None:
        """A slot for one record; None: there is none.

        Args:
            durable: whether the record is; only then a durable one may be removed for it.
        """
        victim = None
        if self.used >= self._slots:
            if self._blocked:
                victim = self._blocked.pop()
            elif (victim := self._oldest(durable)) is not None:
                del self._like(victim)[victim.key]
            else:
                return None
        self._open += 1
        return Slot(victim)

    def release(self, key: bytes) -> Slot | None:
        """The slot of a record that is to be removed; None: there is no such record."""
        kept = self.get(key)
        if kept is None:
            return None
        del self._like(kept)[key]
        self._open += 1
        return Slot(kept)

    def fill(self, kept: Kept) -> None:
        """The slot has this record now."""
        self._open -= 1
        self._add(kept)

    def vacate(self) -> None:
        """The slot is empty: there is no file."""
        self._open -= 1

    def block(self, kept: Kept) -> None:
        """The slot may have a file that could not be removed. It is the next victim."""
        self._open -= 1
        self._blocked.append(kept)

    def _oldest(self, durable: bool) -> Kept | None:
        records = chain(self._ordinary.values(), self._durable.values() if durable else ())
        return next((kept for kept in records if kept.key not in self._reading), None)

    def _add(self, kept: Kept) -> None:
        self._like(kept)[kept.key] = kept

    def _like(self, kept: Kept) -> OrderedDict[bytes, Kept]:
        return self._durable if kept.durable else self._ordinary
