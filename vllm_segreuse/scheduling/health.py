# SPDX-License-Identifier: Apache-2.0
"""Errors over what all requests share end reuse, or the second tier, never vLLM's engine."""

from __future__ import annotations

import logging
from types import TracebackType

logger = logging.getLogger("vllm.segreuse")

ERROR, WEIGHTS_CHANGED = "error", "weights_changed"
"""Reasons of bypasses."""


class Health:
    """One per engine and part of it.

    Args:
        what: the part, for the log.

    Attributes:
        broken: nothing is reused and nothing donates until everything is forgotten. Plans that vLLM
            has allocated blocks for are still carried out. Of the second tier: nothing is stored
            there, and nothing read.
        reason: why it is broken, as a reason for which requests are bypassed.
    """

    def __init__(self, what: str = "segment reuse") -> None:
        self.what = what
        self.broken = False
        self.reason = ERROR

    def contained(self, where: str) -> Contained:
        """An error inside ends reuse, and goes no further."""
        return Contained(self, where)

    def weights_changed(self) -> None:
        """What is known was computed with other weights, and cannot be forgotten yet."""
        self.broken, self.reason = True, WEIGHTS_CHANGED
        logger.warning(
            "the model's weights were changed while requests hold KV of those before: %s is off "
            "until the prefix cache is reset",
            self.what,
        )

    def recover(self) -> None:
        """Everything was forgotten: whatever was wrong is gone."""
        self.broken, self.reason = False, ERROR


class Contained:
    """See `Health.contained`. A class, since it is entered for every block that is evicted, and a
    generator takes four times as long."""

    __slots__ = ("_health", "_where")

    def __init__(self, health: Health, where: str) -> None:
        self._health = health
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._health.broken = True
        logger.error(
            "%s failed in %s, and is off until the prefix cache is reset",
            self._health.what,
            self._where,
            exc_info=error,
        )
        return True
