# SPDX-License-Identifier: Apache-2.0
"""Errors over what all requests share end reuse, never vLLM's engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm.segreuse")


class Health:
    """One per engine.

    Attributes:
        broken: nothing is reused and nothing donates until everything is forgotten. Plans that vLLM
            has allocated blocks for are still carried out.
    """

    def __init__(self) -> None:
        self.broken = False

    @contextmanager
    def contained(self, where: str) -> Iterator[None]:
        """An error inside ends reuse, and goes no further."""
        try:
            yield
        except Exception:
            self.broken = True
            logger.exception(
                "segment reuse failed in %s, and is off until the prefix cache is reset", where
            )

    def recover(self) -> None:
        """Everything was forgotten: whatever was wrong is gone."""
        self.broken = False
