# SPDX-License-Identifier: Apache-2.0
"""What the workers' half of a feature sends to the scheduler's half."""

from __future__ import annotations

from typing import Protocol, Self


class Message(Protocol):
    """Of one rank and one step, or of several."""

    def merged(self, other: Self) -> Self:
        """With that of another rank, or of an earlier step that failed on another rank."""
