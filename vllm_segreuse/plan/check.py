# SPDX-License-Identifier: Apache-2.0
"""Whether the similar segments of a plan are accepted: by their first tokens, the *halo*.

prompt    new  | h h h h a b c d e f |  new      h: halo, always computed
donor          | h h h h a b c d e f |           compared with the donor's, moved
                           `- moved if both are alike, else computed in a second round
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_segreuse.plan.arrays import BoolArray, IntArray


class Halo(NamedTuple):
    """What the server asks of similar segments.

    Attributes:
        tokens: first ones of each that are always computed.
        max_drift: see `Check`; None: nothing is compared.
    """

    tokens: int = 0
    max_drift: float | None = None


NO_HALO = Halo()


class Check(NamedTuple):
    """Which similar segments of a plan a program tests, and what they must keep to.

    Attributes:
        first, stop: int32 `[segments]`, of each, counted from the plan's start.
        halo_tokens: see `Halo`.
        max_drift: a segment whose halo differs more (`prefill/acceptance.py`) is rejected.
    """

    first: IntArray
    stop: IntArray
    halo_tokens: int
    max_drift: float

    @property
    def halo_stop(self) -> IntArray:
        """int32 `[segments]`: where the halo of each ends."""
        return np.minimum(self.first + self.halo_tokens, self.stop)

    def halos(self, num_tokens: int) -> BoolArray:
        """bool `[num_tokens]`: which tokens of the plan are in a halo."""
        return _within(self.first, self.halo_stop, num_tokens)

    def is_rejected(self, drifts: Sequence[float]) -> BoolArray:
        """bool `[segments]`, by how far the halo of each is off; NaN is too far."""
        return ~(np.asarray(drifts) <= self.max_drift)

    def rejected(self, drifts: Sequence[float], num_tokens: int) -> BoolArray:
        """bool `[num_tokens]`: tokens of rejected segments."""
        which = self.is_rejected(drifts)
        return _within(self.first[which], self.stop[which], num_tokens)


def _within(first: IntArray, stop: IntArray, num_tokens: int) -> BoolArray:
    inside = np.zeros(num_tokens, np.bool_)
    for begin, end in zip(first, stop, strict=True):
        inside[begin:end] = True
    return inside
