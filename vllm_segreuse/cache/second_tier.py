# SPDX-License-Identifier: Apache-2.0
"""Pieces that come from the second tier, as the planner sees them.

The segment index knows records of the tier beside blocks of vLLM's pool, under ids of their own. A
finder's pieces name either. Before a plan is made, the records have to be in host memory, and are
held there until the workers have read them; what cannot be had in time is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.plan import BoolArray, IntArray, Tier


class SecondTier(Protocol):
    """What the planner needs of it.

    Attributes:
        first_entry: lowest id of a record in the index.
        min_run_tokens: fewer tokens in a row are not loaded.
    """

    first_entry: int
    min_run_tokens: int

    def hold(self, request_id: str, entries: IntArray) -> IntArray | None:
        """Have records in host memory, and keep them there, all of them or none.

        Args:
            entries: int32 `[n]`, distinct ids of records.

        Returns:
            int32 `[n]`, the row of each, -1 for one that cannot be had; None: some are on their
            way, and none is held. Ask again in a later step.
        """

    def let_go(self, request_id: str) -> None:
        """Hold nothing for a request whose plan is not carried out."""

    def sent(self, request_ids: Sequence[str]) -> None:
        """The plans of these requests leave with this step: what they read is held until all
        workers have read it."""

    def left(self, request_id: str) -> None:
        """A request has ended, or runs without a plan; what its plan reads is held as before."""


class NoTier:
    """There is no second tier: the index knows blocks of vLLM's pool only."""

    first_entry = int(np.iinfo(np.int32).max)
    min_run_tokens = 0

    def hold(self, request_id: str, entries: IntArray) -> IntArray | None:
        """Nobody asks."""
        return entries

    def let_go(self, request_id: str) -> None:
        """Nothing is held."""

    def sent(self, request_ids: Sequence[str]) -> None:
        """Nothing is held."""

    def left(self, request_id: str) -> None:
        """Nothing is held."""


def by_tier(matches: Matches, tier: SecondTier, whole: bool = False) -> Matches:
    """Matches whose pieces say which tier they come from, without short runs of records.

    Args:
        whole: they are whole blocks: none of what is loaded is for nothing, however short a run.
    """
    pieces = matches.pieces
    tiered = pieces.block >= tier.first_entry
    if not tiered.any():
        return matches
    source = np.where(tiered, Tier.HOST, pieces.source).astype(np.int8)
    matches = matches._replace(pieces=replace(pieces, source=source))
    if whole:
        return matches
    ends = pieces.destination + pieces.length
    goes_on = tiered[1:] & tiered[:-1] & (ends[:-1] == pieces.destination[1:])
    run = np.concatenate(([0], np.cumsum(~goes_on)))
    is_long = np.bincount(run, weights=pieces.length) >= tier.min_run_tokens
    return keeping(matches, ~tiered | is_long[run])


def on_rows(matches: Matches, tier: SecondTier, request_id: str) -> Matches | None:
    """Matches whose records are held, and named by their rows; None: they are not there yet.

    Args:
        matches: from `by_tier`.
    """
    pieces = matches.pieces
    tiered = pieces.source != Tier.GPU
    if not tiered.any():
        return matches
    entries, which = np.unique(pieces.block[tiered], return_inverse=True)
    rows = tier.hold(request_id, entries)
    if rows is None:
        return None
    block = pieces.block.copy()
    block[tiered] = rows[which]
    return keeping(matches._replace(pieces=replace(pieces, block=block)), block >= 0)


def keeping(matches: Matches, kept: BoolArray) -> Matches:
    """Some of the pieces; `max_depth` stays, as a bound."""
    if kept.all():
        return matches
    return Matches.of(matches.pieces.where(kept), matches.max_depth)
