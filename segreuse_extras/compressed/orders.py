# SPDX-License-Identifier: Apache-2.0
"""Orders to compress a document; each travels with a request of the server's own.

prompt of a score     | context | chunk | chunk once more | filler    the copy probes the chunk
prompt of a copy      | kept tokens of the chunk | filler             moved from the chunk's blocks
prompt with anchors   | start | anchors so far | chunk | its anchors        the last are kept
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self


class ScoreOrder(NamedTuple):
    """Choose tokens of a prompt by the attention that what follows them pays.

    Attributes:
        first, stop: the tokens to choose from, `[first, stop)`.
        keep: how many are chosen.
    """

    first: int
    stop: int
    keep: int

    def encode(self) -> list[int]:
        """As a list, which sampling parameters can carry."""
        return list(self)

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The order that `encode` wrote.

        Raises:
            ValueError: it did not.
        """
        first, stop, keep = map(int, value)
        if not (0 <= first < stop and 0 < keep <= stop - first):
            raise ValueError(f"{value!r} is no order to score")
        return cls(first, stop, keep)


class CopyOrder(NamedTuple):
    """Make a prompt's first tokens copies of some of another prompt's.

    Attributes:
        source: tokens of the other prompt, whole blocks of which are in the cache.
        kept: positions there, ascending.
    """

    source: Sequence[int]
    kept: Sequence[int]

    def encode(self) -> list[list[int]]:
        """As lists, which sampling parameters can carry."""
        return [list(self.source), list(self.kept)]

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The order that `encode` wrote.

        Raises:
            ValueError: it did not.
        """
        source, kept = value
        ascending = all(a < b for a, b in pairwise(kept))
        if not kept or not ascending or kept[0] < 0 or kept[-1] >= len(source):
            raise ValueError(f"{len(kept)} positions of {len(source)} tokens are no order to copy")
        return cls(source, kept)


class AnchorOrder(NamedTuple):
    """Keep some of a prompt's tokens, computed behind what was kept of an entry so far.

    Attributes:
        entry: whose parts stand behind the first token, in order.
        copied: tokens of these parts.
        kept: tokens that are kept, from the first token of the order to freeze on.
    """

    entry: str
    copied: int
    kept: int

    def encode(self) -> list[Any]:
        """As a list, which sampling parameters can carry."""
        return list(self)

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The order that `encode` wrote.

        Raises:
            ValueError: it did not.
        """
        entry, copied, kept = value
        if not entry or copied < 0 or kept < 1:
            raise ValueError(f"{value!r} is no order to keep anchors")
        return cls(entry, copied, kept)
