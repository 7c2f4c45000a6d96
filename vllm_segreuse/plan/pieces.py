# SPDX-License-Identifier: Apache-2.0
"""Which KV a plan copies: from which block, to where in the prompt.

donor      x x a b | c d e f | g h z z        blocks of four tokens, at positions 40, 44, 48
prompt     . . . a b c d e f g h . .
pieces           ---                          destination 3, length 2, offset 2, position 42
                     -------                  destination 5, length 4, offset 0, position 44
                             ---              destination 9, length 2, offset 0, position 48
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_segreuse.plan.arrays import BoolArray, FloatArray, IntArray
from vllm_segreuse.plan.images import Images

ALL_LAYERS = np.iinfo(np.int32).max
"""More layers than any model has."""


class Tier(IntEnum):
    """Where a donor block lies."""

    GPU = 0
    """In vLLM's own pool."""

    HOST = 1
    """In host memory; blocks are rows of the tier's region."""


class Segments(NamedTuple):
    """Runs of reused tokens, each from one sequence, in order.

    Attributes:
        first: int32 `[n]`, where each begins.
        position: int32 `[n]`, of its first token in the sequence that it was computed in: how many
            tokens it was read behind.
        in_context: bool `[n]`, whether it was read behind the very text that is in front of it.
        changed: float `[n]`, of the text that its tokens were read behind there, and stand behind
            here, the share that is only on one side: 0 for the same text, 1 for text of which
            nothing is known to be the same. A mean over its tokens, behind each of which those of
            the segment stand, too: a date in front of 6,000 tokens changes little. 1 also for text
            that began a sequence and no longer does: its first token drew the attention that has
            no other use (an attention sink, arXiv 2309.17453).
    """

    first: IntArray
    position: IntArray
    in_context: BoolArray
    changed: FloatArray

    @classmethod
    def elsewhere(cls, first: IntArray, position: IntArray) -> Segments:
        """Segments that were read behind text of which nothing is known to be here."""
        return cls(first, position, np.zeros(len(first), np.bool_), np.ones(len(first)))


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of tokens, each copied from one block; ordered by destination, not overlapping.

    Attributes:
        destination: int32 `[n]`, position of the first token in the prompt.
        length: int32 `[n]`, tokens.
        block: int32 `[n]`, id of the donor block in its tier.
        offset: int32 `[n]`, of the first copied token in the donor block.
        position: int32 `[n]`, of the first copied token in the donor's own sequence.
        source: int8 `[n]`, `Tier` of the donor block.
        is_similar: bool `[n]`, whether the piece was found in text that is only similar. Its own
            tokens are equal all the same.
        in_context: bool `[n]`, whether the donor was computed behind the very text that is in front
            of the piece (`cache/contexts.py`).
        kept: int32 `[n]`, tokens in front of the piece that the donor was computed behind, too.
        layers: int32 `[n]`, how many layers KV is moved at, the lowest ones. At the others the
            tokens are computed, from the donor's boundary states; `ALL_LAYERS`: at none.
        turn: int32 `[n]`, positions by which keys are rotated: `destination - position`, but for
            images in front (`images.py`).
        begins: bool `[n]`, whether the donor's sequence is known to be another one than that of the
            piece before.
    """

    destination: IntArray
    length: IntArray
    block: IntArray
    offset: IntArray
    position: IntArray
    source: npt.NDArray[np.int8]
    is_similar: BoolArray
    in_context: BoolArray
    kept: IntArray
    layers: IntArray
    turn: IntArray
    begins: BoolArray

    @classmethod
    def from_table(
        cls,
        table: npt.ArrayLike,
        source: Tier = Tier.GPU,
        is_similar: bool = False,
        layers: npt.ArrayLike = ALL_LAYERS,
        begins: npt.ArrayLike = False,
    ) -> Pieces:
        """Pieces of one tier, found in one way.

        Args:
            table: `[n, 5]`: destination, length, block, offset and position of each.
            source, is_similar: of all.
            layers, begins: of all, or of each `[n]`.
        """
        columns = np.ascontiguousarray(np.asarray(table, np.int32).reshape(-1, 5).T)
        destination, length, block, offset, position = columns
        return cls(
            destination,
            length,
            block,
            offset,
            position,
            source=np.full(length.size, source, np.int8),
            is_similar=np.full(length.size, is_similar, np.bool_),
            in_context=np.zeros(length.size, np.bool_),
            kept=np.zeros(length.size, np.int32),
            layers=np.full(length.size, layers, np.int32),
            turn=destination - position,
            begins=np.full(length.size, begins, np.bool_),
        )

    def merged(self, others: Pieces) -> Pieces:
        """These and others, which go to other positions."""
        both = [
            np.concatenate(pair) for pair in zip(self._columns(), others._columns(), strict=True)
        ]
        order = np.argsort(both[0])
        return Pieces(*(column[order] for column in both))

    def _columns(self) -> Iterator[np.ndarray]:
        return (getattr(self, column.name) for column in fields(self))

    def rows(self) -> Sequence[list[int]]:
        """Destination, length, block, offset and position of each piece."""
        columns = (self.destination, self.length, self.block, self.offset, self.position)
        return np.stack(columns, axis=1).tolist()

    def __len__(self) -> int:
        return self.destination.size

    @property
    def num_tokens(self) -> int:
        """Tokens that are copied."""
        return int(self.length.sum())

    @property
    def num_similar(self) -> int:
        """Tokens that were found in similar text."""
        return int(self.length[self.is_similar].sum())

    def enters(self, start: int, stop: int) -> IntArray | None:
        """int32 `[stop - start]`: the layer from which on each token is computed, -1 where it is
        moved at all layers, or not at all; None: all are."""
        partial = self.layers != ALL_LAYERS
        if not partial.any():
            return None
        enters = np.full(stop - start, -1, np.int32)
        lengths = self.length[partial]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        first = self.destination[partial] - start
        enters[np.repeat(first, lengths) + within] = np.repeat(self.layers[partial], lengths)
        return enters

    @property
    def stop(self) -> int:
        """Position behind the last copied token; 0: nothing is copied."""
        return int(self.destination[-1] + self.length[-1]) if len(self) else 0

    @property
    def donor_blocks(self) -> list[int]:
        """Distinct blocks of vLLM's pool that are read. The last of a sequence come first: vLLM
        evicts in the order in which blocks become free."""
        of_pool = np.flatnonzero(self.source == Tier.GPU)
        blocks = self.block[of_pool[np.argsort(-self.position[of_pool], kind="stable")]]
        return list(dict.fromkeys(blocks.tolist()))

    @property
    def num_tiered(self) -> int:
        """Tokens that are copied from the second tier."""
        return int(self.length[self.source != Tier.GPU].sum())

    def where(self, kept: BoolArray | np.ndarray) -> Pieces:
        """Some of the pieces.

        Args:
            kept: bool `[n]`, or which ones.
        """
        return Pieces(*(column[kept] for column in self._columns()))

    def up_to(self, stop: int) -> Pieces:
        """What of them goes to positions before `stop`."""
        left = np.minimum(self.length, stop - self.destination).astype(np.int32)
        return replace(self, length=left).where(left > 0)

    def behind(self, start: int) -> Pieces:
        """What of them goes to positions from `start` on."""
        cut = np.maximum(start - self.destination, 0).astype(np.int32)
        left = replace(
            self,
            destination=self.destination + cut,
            length=self.length - cut,
            offset=self.offset + cut,
            position=self.position + cut,
            kept=self.kept + cut,
            begins=self.begins & (cut == 0),
        )
        return left.where(left.length > 0)

    def turned(self, behind: IntArray, images: Images | None) -> Pieces:
        """The same copies, with what images change of their rotation; split where that changes.

        Args:
            behind: int32 `[blocks, block_size]`: lag of each token of the donors (`images.py`).
            images: of the prompt; None: it has none.
        """
        if not len(self):
            return self
        first = np.cumsum(self.length) - self.length
        piece = np.repeat(np.arange(len(self)), self.length)
        within = (np.arange(len(piece)) - first[piece]).astype(np.int32)
        turn = self.turn[piece] + behind[self.block[piece], self.offset[piece] + within]
        if images is not None:
            turn -= images.position_offsets(0, self.stop)[self.destination[piece] + within]
        begins = np.ones(len(piece), np.bool_)
        begins[1:] = (piece[1:] != piece[:-1]) | (turn[1:] != turn[:-1])
        where = np.flatnonzero(begins)
        split, within = self.where(piece[where]), within[where]
        return replace(
            split,
            destination=split.destination + within,
            length=np.diff(np.append(where, len(piece))).astype(np.int32),
            offset=split.offset + within,
            position=split.position + within,
            kept=split.kept + within,
            turn=turn[where],
            begins=split.begins & (within == 0),
        )

    def of_segments_above(self, tokens: int) -> Pieces:
        """Those of segments of more than so many tokens."""
        segment = self.segment
        lengths = np.bincount(segment, weights=self.length)
        return self.where(lengths[segment] > tokens)

    def reused(self, start: int, stop: int) -> BoolArray:
        """bool `[stop - start]`: which positions of a range that holds all pieces are copied to."""
        steps = np.zeros(stop - start + 1, dtype=np.int8)
        steps[self.destination - start] = 1
        steps[self.destination + self.length - start] -= 1  # none ends where another does
        return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)

    def segments(self, start: int) -> Segments:
        """Runs of tokens of one sequence that followed each other there, and were found in the same
        way, counted from `start`."""
        first = np.flatnonzero(self.starts)
        length = np.diff(np.append(0, np.cumsum(self.length))[np.append(first, len(self))])
        both = self.position[first] + self.destination[first]
        changed = both - 2 * self.kept[first]
        # Token n of a segment stands behind both + 2 n tokens of both sides; the mean by integral.
        share = changed / 2 * np.log1p(2 * length / np.maximum(both, 1)) / length
        share[(self.position[first] == 0) & (both > 0)] = 1.0
        return Segments(
            np.asarray(self.destination[first] - start, dtype=np.int32),
            np.asarray(self.position[first], dtype=np.int32),
            self.in_context[first],
            np.where(self.in_context[first], 0.0, share),
        )

    @property
    def segment(self) -> IntArray:
        """int32 `[n]`: number of the segment that each piece is part of, from 0 on."""
        return np.asarray(np.cumsum(self.starts) - 1, np.int32)

    def similar_segments(self, start: int) -> tuple[IntArray, IntArray]:
        """First token of each segment of similar text, and the one behind its last; int32 `[n]`,
        counted from `start`."""
        first = np.flatnonzero(self.starts)
        last = np.append(first[1:], len(self)) - 1
        first, last = first[self.is_similar[first]], last[self.is_similar[first]]
        stop = self.destination[last] + self.length[last]
        return self.destination[first] - np.int32(start), stop - np.int32(start)

    @property
    def starts(self) -> BoolArray:
        """bool `[n]`: where a segment begins."""
        shift = self.destination - self.position
        first = np.ones(len(self), dtype=np.bool_)
        first[1:] = (
            (self.destination[:-1] + self.length[:-1] != self.destination[1:])
            | (shift[:-1] != shift[1:])
            | (self.is_similar[:-1] != self.is_similar[1:])
            | (self.in_context[:-1] != self.in_context[1:])
            | self.begins[1:]
        )
        return first
