# SPDX-License-Identifier: Apache-2.0
"""The order to keep what a request computes in GPU memory; it travels with the request."""

from __future__ import annotations

from typing import NamedTuple, Self


class FreezeOrder(NamedTuple):
    """What a request that computes a part of an entry carries along.

    Attributes:
        entry: name of the entry; no colons.
        part: index of the part.
        parts: number of parts of the entry.
        first_token: tokens of the prompt before it belong to the context, not to the entry.
    """

    entry: str
    part: int
    parts: int
    first_token: int

    def encode(self) -> str:
        """As one string, which sampling parameters can carry."""
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The order that `encode` wrote.

        Raises:
            ValueError: it did not.
        """
        entry, *numbers = text.split(":")
        part, parts, first_token = map(int, numbers)
        if not (entry and 0 <= part < parts and first_token >= 0):
            raise ValueError(f"{text!r} is no order to freeze")
        return cls(entry, part, parts, first_token)
