# SPDX-License-Identifier: Apache-2.0
"""An order to compute anchors of a document; it travels with a request of the server's own.

prompt    | start | anchors so far | chunk | its anchors        the last are kept
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self


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
