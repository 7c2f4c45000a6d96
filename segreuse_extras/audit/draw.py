# SPDX-License-Identifier: Apache-2.0
"""Which requests are audited: by chance, and never more than the limits allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from segreuse_extras.audit.options import AuditOptions

MOST_AT_ONCE = 16
"""Audits under way. Workers hold a row of logits for each: 600 kB at 150,000 tokens."""

_MINUTE_S = 60.0

Drawn = Literal["audited", "too_long", "limit"]


class Draw:
    """One per engine.

    Args:
        options: of the audit.
        chance: a number from 0 to below 1, another at each call.
        clock: seconds.
    """

    def __init__(
        self, options: AuditOptions, chance: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._chance = chance
        self._clock = clock
        self._begun: deque[float] = deque()

    def draw(self, num_prompt_tokens: int, under_way: int, fits: bool = True) -> Drawn | None:
        """Whether a request is audited, or why it is not although it was drawn; None: it was not
        drawn.

        Args:
            num_prompt_tokens: of the request.
            under_way: audits that have not ended.
            fits: whether a sequence of the model has room for what is compared behind the prompt.
        """
        if self._chance() >= self._options.share:
            return None
        if num_prompt_tokens > self._options.max_prompt_tokens or not fits:
            return "too_long"
        now = self._clock()
        while self._begun and self._begun[0] <= now - _MINUTE_S:
            self._begun.popleft()
        if under_way >= MOST_AT_ONCE or len(self._begun) >= self._options.per_minute:
            return "limit"
        self._begun.append(now)
        return "audited"
