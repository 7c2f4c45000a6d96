# SPDX-License-Identifier: Apache-2.0
"""Which blocks of GPU memory are of documents that were deleted.

Such a block is an ordinary one until vLLM evicts it. It is not stored then: the document would come
back to host memory and files that it was erased from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_segreuse.tier.catalogue import Seen


class Deleted:
    """One per engine, in the scheduler's thread.

    Args:
        most: keys that are remembered; the oldest are forgotten first. Many are of records that no
            block has.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Records were deleted."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]

    def kept(self, keys: Iterable[bytes]) -> None:
        """Records are wanted again."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Blocks have lost their names."""
        self._keys.clear()

    def split(self, seen: Sequence[Seen], *, evicted: bool) -> tuple[list[Seen], list[Seen]]:
        """Blocks that are to be stored, and those of deleted records.

        Args:
            seen: blocks.
            evicted: whether they have left GPU memory now: what is computed of them later is new.
        """
        deleted = [found for found in seen if found.key in self._keys]
        wanted = [found for found in seen if found.key not in self._keys]
        if evicted:
            self.kept(found.key for found in deleted)
        return wanted, deleted
