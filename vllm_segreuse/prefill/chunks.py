# SPDX-License-Identifier: Apache-2.0
"""Work in chunks: generators that stop behind each, so that whoever runs them may let others run in
between (`backlog.py`)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Chunks = Generator[int, None, T]
"""Yields the work of each chunk, in layer-tokens (one token computed at one layer); its result is
what the last one made."""


def finish(chunks: Chunks[T]) -> T:
    """All chunks at once."""
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            result: T = end.value
            return result
