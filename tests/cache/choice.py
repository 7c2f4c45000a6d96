# SPDX-License-Identifier: Apache-2.0
"""Which donors must be chosen, in plain Python: lists and scans, no hashes, links or bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple


class View(NamedTuple):
    """A physical block as one namespace knows it."""

    tokens: tuple[int, ...]
    position: int
    depth: int
    step: int
    parent: int  # -1 once the parent is gone


@dataclass
class Choice:
    """One search of a prompt, in a namespace.

    Attributes:
        known: what the namespace knows, by block.
        donors: those of them that may donate.
        size: tokens per block.
    """

    known: dict[int, View]
    donors: dict[int, View]
    size: int
    prompt: tuple[int, ...]
    start: int
    stop: int

    def pieces(self) -> list[list[int]]:
        """Destination, length, block, offset and position of each piece, in order."""
        pieces: list[list[int]] = []
        position = self.start
        while position < self.stop and (found := self.next_donor(position)):
            window, block = found
            run = self.leading(block, window, position)
            begin, end = max(window, position), min(window + self.size, self.stop)
            run.append(self.piece(block, window, begin, end))
            while sum(run[-1][:2]) == window + self.size and (child := self.child(block, window)):
                window, block = window + self.size, child[0]
                run.append(self.piece(block, window, window, window + child[1]))
            pieces += run
            position = sum(run[-1][:2])
        return pieces

    def piece(self, block: int, window: int, begin: int, end: int) -> list[int]:
        """The copy of `[begin, end)` from a block whose first token belongs to `window`."""
        offset = begin - window
        return [begin, end - begin, block, offset, self.known[block].position + offset]

    def next_donor(self, position: int) -> tuple[int, int] | None:
        """(window, block)."""
        covering = range(position, position - self.size, -1)
        windows = [*covering, *range(position + 1, self.stop)]
        first = next((window for window in windows if self.twins(window)), None)
        if first is None:
            return None
        edge = max(first, position)
        fit = [(first, block) for block in self.twins(first)]
        for window in range(first + 1, min(first + self.size, self.stop)):
            for block in self.twins(window):
                run = self.leading(block, window, edge)
                if run and run[0][0] == edge:  # it serves what the first window would
                    fit.append((window, block))
        return max(fit, key=self.merit)

    def twins(self, window: int) -> list[int]:
        """Donors with the content of a window."""
        return [b for b, view in self.donors.items() if view.tokens == self.content(window)]

    def merit(self, candidate: tuple[int, int]) -> tuple[int, ...]:
        """The better donor's is larger."""
        window, block = candidate
        view = self.known[block]
        begin = window - self.context(block, window)
        in_place = begin == 0 and view.position == window
        order = -view.depth, view.position - window, -block
        return -begin, in_place, self.shared(block), *order

    def content(self, window: int) -> tuple[int, ...] | None:
        if 0 <= window <= len(self.prompt) - self.size:
            return self.prompt[window : window + self.size]
        return None

    def ancestors(self, block: int) -> list[int]:
        """Blocks in front of one in its sequence, the nearest first."""
        parent = self.known[block].parent
        return [parent, *self.ancestors(parent)] if parent >= 0 else []

    def context(self, block: int, window: int) -> int:
        """Tokens in front of the block that equal those in front of the window."""
        before = [t for a in self.ancestors(block) for t in reversed(self.known[a].tokens)]
        return equal_length(before, self.prompt[:window][::-1])

    def shared(self, block: int) -> int:
        """Blocks in front of the block that are somewhere in the prompt."""
        windows = [self.content(window) for window in range(len(self.prompt))]
        return sum(self.known[ancestor].tokens in windows for ancestor in self.ancestors(block))

    def leading(self, block: int, window: int, floor: int) -> list[list[int]]:
        """Pieces that lead up to the window of a block, as far as its sequence donates."""
        run: list[list[int]] = []
        for ancestor in self.ancestors(block):
            if ancestor not in self.donors or window <= floor:
                break
            tokens = self.known[ancestor].tokens
            before = self.prompt[floor:window]
            equal = equal_length(tokens[::-1], before[::-1])
            if equal:
                first = window - self.size
                run.insert(0, self.piece(ancestor, first, window - equal, window))
            if equal < self.size:
                break
            window -= self.size
        return run

    def kept(self, pieces: list[list[int]], goes_on: list[bool]) -> list[int]:
        """Tokens in front of each piece that were in front of it in its sequence, too.

        Args:
            goes_on: whether a piece continues the one before it.
        """
        taken: Counter[int] = Counter()
        kept: list[int] = []
        before = 0
        for (destination, length, block, offset, position), continues in zip(
            pieces, goes_on, strict=True
        ):
            if continues:
                kept.append(kept[-1] + before)
            else:
                front = self.ancestors(block)[::-1]
                shared = self.common(front, destination) if self.begins([*front, block]) else 0
                found = shared * self.size + sum(min(self.size, taken[a]) for a in front[shared:])
                kept.append(min(found + min(offset, taken[block]), position, destination))
            taken[block] += length
            before = length
        return kept

    def begins(self, blocks: list[int]) -> bool:
        """Whether the first of these is the first of its sequence."""
        return self.known[blocks[0]].position == 0

    def common(self, blocks: list[int], stop: int) -> int:
        """Whole blocks that these and the prompt up to `stop` begin with."""
        tokens = [token for block in blocks for token in self.known[block].tokens]
        return equal_length(tokens, self.prompt[:stop]) // self.size

    def child(self, block: int, window: int) -> tuple[int, int] | None:
        """(block, length) of the child that goes on behind a block."""
        rest = self.prompt[window + self.size : self.stop]
        lengths = {
            b: equal_length(v.tokens, rest) for b, v in self.donors.items() if v.parent == block
        }
        best = max(lengths, key=lambda b: (lengths[b], -self.known[b].depth, -b), default=-1)
        return (best, lengths[best]) if lengths.get(best) else None


def equal_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Equal leading tokens."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
