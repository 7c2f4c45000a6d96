# SPDX-License-Identifier: Apache-2.0
"""Who gives back first when too much is known of blocks that others have computed.

Names of one owner are taken from that owner. Of all owners, those who have the most are asked
first, and of these the one who has used its own for the longest time not: whoever fills the memory
with names loses its own oldest ones, and an owner with few names keeps them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

FEW = 64
"""Owners with fewer prefixes than so many are equal."""


class Shares:
    """What each namespace holds, by owner.

    Args:
        owner_of: whose a namespace is; asked when it begins to hold something.
    """

    def __init__(self, owner_of: Callable[[int], Hashable]) -> None:
        self._owner_of = owner_of
        self._owner: dict[int, Hashable] = {}
        self._held: dict[Hashable, OrderedDict[int, int]] = {}  # the latest used last
        self._totals: dict[Hashable, int] = {}
        self._levels: dict[int, OrderedDict[Hashable, None]] = {}  # the latest used last

    def __contains__(self, namespace: int) -> bool:
        return namespace in self._owner

    def __len__(self) -> int:
        return len(self._owner)

    def used(self, namespace: int) -> None:
        """A namespace that holds something is in use."""
        owner = self._owner[namespace]
        self._held[owner].move_to_end(namespace)
        self._levels[self._level(owner)].move_to_end(owner)

    def holds(self, namespace: int, count: int) -> None:
        """A namespace holds so many prefixes from now on, and is in use; 0: none."""
        if namespace not in self._owner:
            self._owner[namespace] = self._owner_of(namespace)
        owner = self._owner[namespace]
        held = self._held.setdefault(owner, OrderedDict())
        self._leave(owner)
        self._totals[owner] = self._totals.get(owner, 0) - held.pop(namespace, 0) + count
        if count:
            held[namespace] = count
        else:
            del self._owner[namespace]
        if held:
            self._levels.setdefault(self._level(owner), OrderedDict())[owner] = None
        else:
            del self._held[owner], self._totals[owner]

    def next(self) -> int:
        """The namespace that gives back what it holds.

        Raises:
            ValueError: none holds anything.
        """
        owner = next(iter(self._levels[max(self._levels)]))
        return next(iter(self._held[owner]))

    def _level(self, owner: Hashable) -> int:
        return self._totals[owner] // FEW

    def _leave(self, owner: Hashable) -> None:
        if owner in self._totals:
            level = self._level(owner)
            del self._levels[level][owner]
            if not self._levels[level]:
                del self._levels[level]
