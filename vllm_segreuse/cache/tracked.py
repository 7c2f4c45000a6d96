# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of a request, from arrival to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.plan import BoolArray, FreezeOrder, IntArray, Recipe, ReusePlan


class Report(NamedTuple):
    """Outcome of one request's admission; prefix + reused + new = prompt.

    Recomputed tokens and exact ones (see `exact.py`) are part of the reused. `computed_share` is
    the work: what is computed of (token, layer) pairs behind the prefix. Both are the most there
    can be until the workers have told, where they decide.
    """

    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    new_tokens: int
    matches: int
    bypass_reason: str | None
    exact_tokens: int = 0
    computed_share: float = 1.0


@dataclass
class Memo:
    """Matches, and what they hold for: start, stop and the index's version."""

    key: tuple[int, int, int]
    matches: Matches


@dataclass
class TrackedRequest:
    """A request with extra keys, from arrival to end.

    Attributes:
        namespace: interned namespace of the index.
        min_reused_tokens: below this many reusable tokens the request runs without reuse.
        make_recipe: the request's policy with its options bound; takes the mask of reused tokens
            and where segments begin.
        tokens: int32, all tokens known so far.
        policy: name of the policy, for the report.
        bypass: reason why this request never reuses, or None.
        donates: whether its blocks enter the index.
        resident_blocks: for the exact tier, in the place of the index: block ids of blocks
            `[first, last)` of the request, -1 where none is resident under its exact name.
        freeze: what is to become of its blocks when it ends; None: nothing.
        plan: the plan in force for its current blocks; blocks from `plan.start` on are approximate.
        report: outcome of its first admission.
        awaited: the plan that the report is about, while the workers have not told what they
            computed of it.
        start: tokens of vLLM's own prefix hit when it was last asked about.
        reason: why it was not planned then.
        num_segments: segments that were found then.
        memo: what was found in the index.
    """

    request_id: str
    namespace: int
    min_reused_tokens: int
    make_recipe: Callable[[BoolArray, IntArray], Recipe]
    tokens: IntArray
    policy: str = ""
    bypass: str | None = None
    donates: bool = True
    resident_blocks: Callable[[int, int], IntArray] | None = None
    freeze: FreezeOrder | None = None
    plan: ReusePlan | None = None
    report: Report | None = None
    awaited: ReusePlan | None = None
    start: int = 0
    reason: str | None = None
    num_segments: int = 0
    _hashes: np.ndarray[tuple[int], np.dtype[np.uint64]] | None = None
    memo: Memo | None = field(default=None, repr=False)

    def hashes(self, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Hash of every window of `block_size` tokens, computed once."""
        if self._hashes is None:
            self._hashes = window_hashes(self.tokens, block_size)
        return self._hashes

    def retoken(self, tokens: IntArray) -> None:
        """The request was preempted and now has more tokens."""
        self.tokens = tokens
        self._hashes = self.memo = None
