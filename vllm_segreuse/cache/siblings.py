# SPDX-License-Identifier: Apache-2.0
"""Blocks of several KV cache groups that hold the same tokens.

With its hybrid KV cache manager, vLLM gives layers that attend to a window blocks of their own, and
frees them once the window has passed. They keep their content until they are given to somebody
else, as cached blocks do. So a block of the group that segments are found in is whole as long as
none of its siblings in the other groups was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_segreuse.plan import IntArray


class Siblings:
    """Of the blocks of one pool.

    Args:
        num_blocks: of the pool.
        num_others: groups beside the one that segments are found in.
    """

    def __init__(self, num_blocks: int, num_others: int) -> None:
        self._of = np.full((num_others, num_blocks), -1, np.int32)
        self._whose = np.full(num_blocks, -1, np.int32)

    def note(self, block_ids: Sequence[int], others: Sequence[Sequence[int]]) -> None:
        """Blocks were filled together.

        Args:
            block_ids: of the first group.
            others: of each other group, as many; below 0 where there is none.
        """
        self.lost(block_ids)
        there = np.asarray(others, np.int32)
        are_there = (there >= 0).all(axis=0)
        ids, there = np.asarray(block_ids, np.int32)[are_there], there[:, are_there]
        self._of[:, ids] = there
        self._whose[there] = ids

    def of(self, block_ids: npt.NDArray[np.integer]) -> IntArray:
        """int32 `[groups, blocks]`, in each of the other groups; -1: not known, or not all are
        there."""
        found: IntArray = self._of[:, block_ids]
        return found

    def all_of(self, block_ids: Iterable[int]) -> list[int]:
        """Those that are known of some blocks."""
        found = self._of[:, [*block_ids]].ravel()
        return [int(block) for block in found[found >= 0]]

    def are_whole(self, block_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool `[blocks]`: which blocks have all of their siblings."""
        return np.asarray(self._of[0, [*block_ids]] >= 0, np.bool_)

    def lost(self, block_ids: Sequence[int]) -> list[int]:
        """Blocks hold something else from now on. Nothing is known any more of whom they belong to.

        Returns:
            Blocks of the first group that were whole, and hold what they did.
        """
        ids = np.asarray(block_ids, np.int64)
        owners = np.unique(self._whose[ids])
        owners = owners[owners >= 0]
        gone = np.union1d(ids, owners)
        siblings = self._of[:, gone].ravel()
        self._whose[siblings[siblings >= 0]] = -1
        self._of[:, gone] = -1
        return [int(block) for block in np.setdiff1d(owners, ids)]

    def clear(self) -> None:
        """Nothing is known of any block."""
        self._of.fill(-1)
        self._whose.fill(-1)
