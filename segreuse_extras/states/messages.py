# SPDX-License-Identifier: Apache-2.0
"""What both halves tell each other of maps of states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self


class CaptureOrder(NamedTuple):
    """A segment whose map is wanted, once its request computes it.

    Attributes:
        segment: its number.
        request_id: of the request.
        first, stop: positions there.
    """

    segment: int
    request_id: str
    first: int
    stop: int


class Placed(NamedTuple):
    """A segment that is reused as a whole.

    Attributes:
        segment: its number.
        first, stop: positions in the prompt.
    """

    segment: int
    first: int
    stop: int


class PlanStates(NamedTuple):
    """What a plan needs beside its pieces.

    Attributes:
        segments: that it reuses, in order.
        running: block of each group of states that vLLM's step goes on from.
        before: the block with the state in front of the plan, of each group; none: the prompt
            begins with it.
    """

    segments: tuple[Placed, ...]
    running: tuple[int, ...]
    before: tuple[int, ...]


@dataclass
class StepStates:
    """To the workers, with a step.

    Attributes:
        plans: of it, by request.
        orders: that begin with it.
        dropped: segments whose maps are not needed any more.
    """

    plans: dict[str, PlanStates] = field(default_factory=dict)
    orders: list[CaptureOrder] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Captured:
    """From the workers.

    Attributes:
        complete: segments whose maps are there.
        failed: segments whose maps cannot be had of the request that they were ordered of.
    """

    complete: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    def merged(self, other: Self) -> Self:
        """With that of another step; there is one rank."""
        return type(self)(other.complete + self.complete, other.failed + self.failed)


class MapFacts(NamedTuple):
    """What a worker knows of the model.

    Attributes:
        map_bytes: of one segment.
    """

    map_bytes: int
