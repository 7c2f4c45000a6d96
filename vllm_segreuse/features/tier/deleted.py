# SPDX-License-Identifier: Apache-2.0
"""Which blocks of GPU memory are of documents that were deleted.

Such a block is an ordinary one until vLLM evicts it. It is not stored then: the document would come
back to host memory and files that it was erased from.

A key is that of a deleted document for all blocks that have it and were there when it was deleted,
however many there are: whoever computes a document twice leaves blocks of equal names. What is
computed later is new text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vllm_segreuse.cache.index import was_before
from vllm_segreuse.features.tier.record import Seen


class Deleted:
    """One per engine, in the scheduler's thread.

    Args:
        num_blocks: of vLLM's pool.
        key_of: key of a block of the pool; None: it has no name.
    """

    def __init__(self, num_blocks: int, key_of: Callable[[int], bytes | None]) -> None:
        self._num_blocks = num_blocks
        self._key_of = key_of
        self._steps: dict[bytes, int] = {}  # of the index, by key

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, keys: Iterable[bytes], step: int) -> None:
        """Records were deleted, many of which no block has.

        Args:
            step: of the index.
        """
        self._steps |= dict.fromkeys(keys, step)
        if len(self._steps) > 2 * self._num_blocks:
            there = {*map(self._key_of, range(self._num_blocks))}
            self._steps = {key: of for key, of in self._steps.items() if key in there}

    def kept(self, keys: Iterable[bytes]) -> None:
        """Records are wanted again."""
        for key in keys:
            self._steps.pop(key, None)

    def clear(self) -> None:
        """Blocks have lost their names."""
        self._steps.clear()

    def split(self, seen: Sequence[Seen]) -> tuple[list[Seen], list[Seen]]:
        """Blocks that are to be stored, and those of deleted records."""
        wanted: list[Seen] = []
        deleted: list[Seen] = []
        for found in seen:
            step = self._steps.get(found.key)
            is_deleted = step is not None and not was_before(step, found.born)
            (deleted if is_deleted else wanted).append(found)
        return wanted, deleted
