# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side orders of the second tier, and what the workers report of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm_segreuse.plan.arrays import IntArray


@dataclass(frozen=True, eq=False)
class TierOrders:
    """What the workers do for the second tier in one step.

    Attributes:
        sequence: number of this step's orders, ascending from 1; steps without any have none.
        blocks: int32 `[n]`, blocks of vLLM's pool that are copied before the step writes any.
        rows: int32 `[n]`, rows of the host region that they are copied to.
        verify: whether workers have to look if the weights are still those of the start.
    """

    sequence: int
    blocks: IntArray
    rows: IntArray
    verify: bool = False


@dataclass
class TierDone:
    """What has come of orders since the last report.

    A rank reports a sequence once: when its copies to the region, and all that the step's plans
    read from there, are over.

    Attributes:
        ranks: how many ranks report each sequence.
        failed: sequences whose copies failed on some rank: what their rows hold is undefined.
        without_code: (sequence, place in its orders) of blocks that the codec cannot store: what
            their rows hold is undefined, too.
        other_weights: sequences in which the weights of some rank were not those of the start.
    """

    ranks: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    without_code: set[tuple[int, int]] = field(default_factory=set)
    other_weights: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.ranks)

    def merged(self, other: TierDone) -> TierDone:
        """Reports of two ranks, or of two steps."""
        return TierDone(
            self.ranks + other.ranks,
            self.failed | other.failed,
            self.without_code | other.without_code,
            self.other_weights | other.other_weights,
        )
