# SPDX-License-Identifier: Apache-2.0
"""What namespaces know of blocks that others have computed: a few bytes per namespace and prompt.

vLLM gives the blocks of a common prefix to requests of all namespaces. Each of these may know them,
and there may be thousands. What they know is kept by prompt, not by block:

    cell <- cell <- cell <- cell        one per block, linked to the one in front of it; shared
                      ^       ^
                   mark     mark, mark, mark ...      of one namespace each: the last `count` cells

So an eviction takes as long as for a block of one namespace, and a block that moves to the second
tier takes all who know it along. The entries that the segment index has of a namespace are made
from its marks, when it is looked into (`SegmentIndex.show`).
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.jit import kernel

IntArray = npt.NDArray[np.int32]
Table = npt.NDArray[np.int64]
Cells = npt.NDArray[np.void]
Marks = npt.NDArray[np.void]

CELL = np.dtype(
    [
        ("block", np.int32),  # GONE: evicted; AWAY: on its way to the second tier
        ("key", np.uint32),  # hash of the tokens
        ("parent", np.int32),  # cell of the block in front, -1: unknown
        ("holds", np.int32),  # marks that end here, cells behind, and `detach`
        ("following", np.int32),  # of the same block; of a free cell: the next free one
    ]
)
MARK = np.dtype(
    [
        ("cell", np.int32),  # the last one
        ("count", np.int32),  # cells from there to the front
        ("following", np.int32),  # of the same namespace; of a free mark: the next free one
    ]
)
GONE, AWAY = -1, -2

# Columns of the tables of what a namespace knows: block (GONE, AWAY), key, block in front, cell.
BLOCK, KEY, PARENT, CELL_ID = range(4)

_handles = itertools.count(1)  # one means nothing to another index, or after `clear`

# Where cells and marks come from: the first that was released, the first that was never used.
FREE_CELL, UNUSED_CELL, FREE_MARK, UNUSED_MARK = range(4)
# What is in use, behind them.
_CELLS, _MARKS = 4, 5


class Known:
    """One per index.

    Args:
        num_blocks: of the index.

    Attributes:
        changes: how often namespaces came to know blocks by `attach`.
    """

    def __init__(self, num_blocks: int) -> None:
        self._cells: Cells = np.zeros(256, CELL)
        self._marks: Marks = np.zeros(64, MARK)
        self._first_cell: IntArray = np.zeros(num_blocks, np.int32)  # by block, plus 1
        self._first_mark: IntArray = np.zeros(64, np.int32)  # by namespace, plus 1
        self._spares: IntArray = np.array([-1, 0, -1, 0, 0, 0], np.int32)
        self._detached: dict[int, int] = {}
        self.changes = 0

    @property
    def num_marks(self) -> int:
        """Prefixes that namespaces know, each counted once per namespace."""
        return int(self._spares[_MARKS])

    @property
    def num_cells(self) -> int:
        """Blocks of these prefixes; one that is at the end of several is counted once."""
        return int(self._spares[_CELLS])

    @property
    def num_detached(self) -> int:
        """Handles of `detach` that are neither attached, joined nor let go."""
        return len(self._detached)

    @property
    def num_bytes(self) -> int:
        """Memory of all of it."""
        arrays = self._cells, self._marks, self._first_cell, self._first_mark
        return sum(array.nbytes for array in arrays)

    def has(self, namespace: int) -> bool:
        """Whether a namespace knows, or has known, blocks of others."""
        return namespace < self._first_mark.size and self._first_mark[namespace] > 0

    def add(
        self,
        namespace: int,
        parent: int,
        parent_key: int,
        block_ids: IntArray,
        keys: npt.NDArray[np.uint32],
    ) -> None:
        """A namespace knows consecutive blocks of a sequence from now on.

        Args:
            parent: block in front of the first; -1: unknown.
            parent_key: hash of its tokens.
            block_ids: int32 `[n]`, n > 0; it knows none of them yet.
            keys: uint32 `[n]`, hashes of their tokens.
        """
        self._reserve(namespace, block_ids.size + 1)
        arrays = self._cells, self._first_cell, self._spares
        cell = _add_cells(*arrays, parent, parent_key, block_ids, keys)
        _add_mark(self._marks, self._first_mark, self._spares, namespace, cell, block_ids.size)

    def table(self, namespace: int) -> Table:
        """All that a namespace knows, also what is gone; int64 `[n, 4]`."""
        if not self.has(namespace):
            return np.empty((0, 4), np.int64)
        return _list_known(self._cells, self._marks, int(self._first_mark[namespace]) - 1)

    def count(self, namespace: int) -> int:
        """Blocks that it knows, with those that are on their way to the second tier."""
        if not self.has(namespace):
            return 0
        return _count_known(self._cells, self._marks, int(self._first_mark[namespace]) - 1)

    def prune(self, namespace: int) -> int:
        """Forget prefixes of a namespace whose blocks are all gone; how many are left."""
        if not self.has(namespace):
            return 0
        arrays = self._cells, self._first_cell, self._marks, self._first_mark, self._spares
        return _prune(*arrays, namespace, False)

    def forget(self, namespace: int) -> None:
        """Forget all prefixes of a namespace."""
        if self.has(namespace):
            arrays = self._cells, self._first_cell, self._marks, self._first_mark, self._spares
            _prune(*arrays, namespace, True)

    def evicted(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Blocks are gone, or were replaced. Other numbers are no blocks."""
        _lose(self._cells, self._first_cell, block_ids)

    def blocks_of(self, cells: Table) -> Table:
        """Blocks of cells that marks hold; GONE or AWAY where there is none."""
        return self._cells["block"][cells].astype(np.int64)

    def keys_of_gone(self, namespace: int) -> npt.NDArray[np.uint32]:
        """Hashes of the tokens of blocks that a namespace has known, and that are gone."""
        table = self.table(namespace)
        return np.asarray(table[table[:, BLOCK] == GONE, KEY], np.uint32)

    # From blocks to records of the second tier.

    def detach(self, block: int) -> int:
        """A block may move to the second tier: what is known of it stays known until `attach`, or
        `let_go`.

        Returns:
            A handle; 0: only who computed it knows it.
        """
        first = int(self._first_cell[block]) - 1
        if first < 0:
            return 0
        _detach(self._cells, first)
        self._first_cell[block] = 0
        handle = next(_handles)
        self._detached[handle] = first
        return handle

    def joined(self, handle: int, other: int) -> int:
        """One handle for two, which are then done with; 0: nobody knows either."""
        cells = [self._detached.pop(it) for it in (handle, other) if it in self._detached]
        if not cells:
            return 0
        self._cells["following"][self._same(cells[0])[-1]] = cells[1] if cells[1:] else -1
        joined = next(_handles)
        self._detached[joined] = cells[0]
        return joined

    def attach(self, handle: int, block: int) -> None:
        """Who knew the block of a handle knows another one instead, with the same content. Of one
        that is done with, nothing is known."""
        first = self._detached.pop(handle, None)
        if first is not None:
            _attach(self._cells, self._first_cell, self._spares, first, block)
            self.changes += 1

    def let_go(self, handle: int) -> None:
        """The block of a handle is gone, unless it was attached."""
        first = self._detached.pop(handle, None)
        if first is not None:
            _attach(self._cells, self._first_cell, self._spares, first, GONE)

    def _same(self, cell: int) -> list[int]:
        found = []
        while cell >= 0:
            found.append(cell)
            cell = int(self._cells["following"][cell])
        return found

    def _reserve(self, namespace: int, num_cells: int) -> None:
        if self._spares[UNUSED_CELL] + num_cells > self._cells.size:
            self._cells = np.resize(self._cells, 2 * self._cells.size + num_cells)
        if self._spares[UNUSED_MARK] == self._marks.size:
            self._marks = np.resize(self._marks, 2 * self._marks.size)
        if namespace >= self._first_mark.size:
            grown = np.zeros(2 * namespace, np.int32)
            grown[: self._first_mark.size] = self._first_mark
            self._first_mark = grown


@kernel
def _add_cells(
    cells: Cells,
    first_cell: IntArray,
    spares: IntArray,
    parent: int,
    parent_key: int,
    block_ids: IntArray,
    keys: npt.NDArray[np.uint32],
) -> int:
    """The cell of the last block; those that follow each other as they do already are shared."""
    cell = -1
    if parent >= 0:
        cell = first_cell[parent] - 1
        if cell < 0:
            cell = _new_cell(cells, first_cell, spares, parent, np.uint32(parent_key), -1)
    for i in range(block_ids.size):
        found = first_cell[block_ids[i]] - 1
        while found >= 0 and cells[found].parent != cell:
            found = cells[found].following
        if found < 0:
            found = _new_cell(cells, first_cell, spares, block_ids[i], keys[i], cell)
        cell = found
    cells[cell].holds += 1
    return int(cell)


@kernel
def _new_cell(
    cells: Cells, first_cell: IntArray, spares: IntArray, block: int, key: np.uint32, parent: int
) -> int:
    cell = spares[FREE_CELL]
    if cell >= 0:
        spares[FREE_CELL] = cells[cell].following
    else:
        cell = spares[UNUSED_CELL]
        spares[UNUSED_CELL] += 1
    node = cells[cell]
    node.block, node.key, node.parent, node.holds = block, key, parent, 0
    node.following = first_cell[block] - 1
    first_cell[block] = cell + 1
    if parent >= 0:
        cells[parent].holds += 1
    spares[_CELLS] += 1
    return int(cell)


@kernel
def _add_mark(
    marks: Marks, first_mark: IntArray, spares: IntArray, namespace: int, cell: int, count: int
) -> None:
    mark = spares[FREE_MARK]
    if mark >= 0:
        spares[FREE_MARK] = marks[mark].following
    else:
        mark = spares[UNUSED_MARK]
        spares[UNUSED_MARK] += 1
    node = marks[mark]
    node.cell, node.count, node.following = cell, count, first_mark[namespace] - 1
    first_mark[namespace] = mark + 1
    spares[_MARKS] += 1


@kernel
def _list_known(cells: Cells, marks: Marks, first: int) -> Table:
    count, mark = 0, first
    while mark >= 0:
        count += marks[mark].count
        mark = marks[mark].following
    table = np.empty((count, 4), np.int64)
    mark, end = first, 0
    while mark >= 0:
        cell = marks[mark].cell
        end += marks[mark].count
        for row in range(end - 1, end - 1 - marks[mark].count, -1):
            parent = cells[cell].parent
            table[row, BLOCK], table[row, KEY] = cells[cell].block, cells[cell].key
            table[row, PARENT] = cells[parent].block if parent >= 0 else GONE
            table[row, CELL_ID] = cell
            cell = parent
        mark = marks[mark].following
    return table


@kernel
def _count_known(cells: Cells, marks: Marks, mark: int) -> int:
    count = 0
    while mark >= 0:
        cell = marks[mark].cell
        for _ in range(marks[mark].count):
            count += cells[cell].block != GONE
            cell = cells[cell].parent
        mark = marks[mark].following
    return count


@kernel
def _prune(
    cells: Cells,
    first_cell: IntArray,
    marks: Marks,
    first_mark: IntArray,
    spares: IntArray,
    namespace: int,
    everything: bool,
) -> int:
    """Drop the marks of a namespace whose blocks are all gone, or all marks; how many are left."""
    before, mark, left = -1, first_mark[namespace] - 1, 0
    while mark >= 0:
        following, cell, keeps = marks[mark].following, marks[mark].cell, False
        for _ in range(marks[mark].count):
            keeps |= not everything and cells[cell].block != GONE
            cell = cells[cell].parent
        if keeps:
            before = mark
            left += 1
        else:
            if before >= 0:
                marks[before].following = following
            else:
                first_mark[namespace] = following + 1
            _release(cells, first_cell, spares, marks[mark].cell)
            marks[mark].following = spares[FREE_MARK]
            spares[FREE_MARK] = mark
            spares[_MARKS] -= 1
        mark = following
    return left


@kernel
def _release(cells: Cells, first_cell: IntArray, spares: IntArray, cell: int) -> None:
    """One hold less on a cell; a cell that nobody holds goes, and its hold on the one in front."""
    while cell >= 0:
        node = cells[cell]
        node.holds -= 1
        if node.holds > 0:
            return
        if node.block >= 0:
            other = first_cell[node.block] - 1
            if other == cell:
                first_cell[node.block] = node.following + 1
            else:
                while cells[other].following != cell:
                    other = cells[other].following
                cells[other].following = node.following
        node.following = spares[FREE_CELL]
        spares[FREE_CELL] = cell
        spares[_CELLS] -= 1
        cell = node.parent


@kernel
def _lose(cells: Cells, first_cell: IntArray, block_ids: npt.NDArray[np.int64]) -> None:
    for block in block_ids:
        if 0 <= block < first_cell.size:
            cell = first_cell[block] - 1
            first_cell[block] = 0
            while cell >= 0:
                cells[cell].block = GONE
                cell = cells[cell].following


@kernel
def _detach(cells: Cells, cell: int) -> None:
    while cell >= 0:
        cells[cell].block = AWAY
        cells[cell].holds += 1
        cell = cells[cell].following


@kernel
def _attach(cells: Cells, first_cell: IntArray, spares: IntArray, cell: int, block: int) -> None:
    """The cells of a block that was detached belong to another one, or to none (GONE)."""
    while cell >= 0:
        following = cells[cell].following
        cells[cell].block = block
        if block >= 0:
            cells[cell].following = first_cell[block] - 1
            first_cell[block] = cell + 1
        _release(cells, first_cell, spares, cell)
        cell = following
