# SPDX-License-Identifier: Apache-2.0
"""What the workers report of a plan."""

from __future__ import annotations

from typing import NamedTuple


class AcceptanceOutcome(NamedTuple):
    """What came of the test of a plan's similar segments.

    Attributes:
        drifts: of each segment, how far its halo was off (`prefill/acceptance.py`).
        added: reused tokens that were computed because of it, and else would not have been.
        again: tokens of the second round: these, and those that had been computed behind them.
    """

    drifts: tuple[float, ...]
    added: int = 0
    again: int = 0


class PlanOutcome(NamedTuple):
    """What the workers report of a plan.

    Attributes:
        computed: tokens that were computed at all layers behind the dense ones, in the first round
            of a plan that tests similar segments.
        drift: see `prefill/drift.py`; None: not measured.
        in_full: everything was computed after that, because the drift was above `max_drift`.
        positions: of the tokens that were computed, ascending; None: the plan does not explain.
        acceptance: of similar segments; None: not tested, or everything was computed.
        restoration: number of the plan's restoration; 0: it has none.
        is_restored: whether what it restores is in place, on all ranks. If not, it was computed.
        again: new tokens that were computed once more, behind what was chosen.
    """

    computed: int
    drift: float | None = None
    in_full: bool = False
    positions: tuple[int, ...] | None = None
    acceptance: AcceptanceOutcome | None = None
    restoration: int = 0
    is_restored: bool = False
    again: int = 0
